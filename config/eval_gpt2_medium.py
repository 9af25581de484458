# How good is OpenAI's GPT-2 medium (350M parameters) on OpenWebText? Val loss is about 2.84.
#   python train.py config/eval_gpt2_medium.py

batch_size = 8
eval_iters = 500  # many, for a steady number
eval_only = True
wandb_log = False
init_from = "gpt2-medium"
