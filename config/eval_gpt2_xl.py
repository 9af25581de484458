# How good is OpenAI's GPT-2 XL (1558M parameters) on OpenWebText? Val loss is about 2.54.
#   python train.py config/eval_gpt2_xl.py

batch_size = 8
eval_iters = 500  # many, for a steady number
eval_only = True
wandb_log = False
init_from = "gpt2-xl"
