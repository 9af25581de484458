# GPT-2's 124M on OpenWebText: val loss 2.85 after about four days on eight A100.
#   torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-124M"

# 12 rows of 1,024 tokens, 40 times: 491,520 tokens per iteration, on any number of GPUs that divides 40
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8

max_iters = 600000  # 295 billion tokens
lr_decay_iters = max_iters

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
