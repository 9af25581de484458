# How good is OpenAI's GPT-2 large (774M parameters) on OpenWebText? Val loss is about 2.67.
#   python train.py config/eval_gpt2_large.py

batch_size = 8
eval_iters = 500  # many, for a steady number
eval_only = True
wandb_log = False
init_from = "gpt2-large"
