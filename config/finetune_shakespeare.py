# GPT-2 XL learns to write like Shakespeare in 20 iterations.
#   python data/shakespeare/prepare.py
#   python train.py config/finetune_shakespeare.py

import time

out_dir = "out-shakespeare"
eval_interval = 5
eval_iters = 40
always_save_checkpoint = False  # ckpt.pt stays the one with the best val loss

wandb_log = False
wandb_project = "shakespeare"
wandb_run_name = "ft-" + str(time.time())

dataset = "shakespeare"
init_from = "gpt2-xl"

# 1 row of 1,024 tokens, 32 times: 32,768 tokens per iteration, so 9 iterations see the 301,966 tokens once
batch_size = 1
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5
decay_lr = False
