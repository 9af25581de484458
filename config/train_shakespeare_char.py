# A small model of Shakespeare by characters: best val loss 1.47, three minutes on an A100.
#   python data/shakespeare_char/prepare.py
#   python train.py config/train_shakespeare_char.py

out_dir = "out-shakespeare-char"
eval_interval = 250  # often: so little text is soon learnt by heart
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # and then val loss rises again: ckpt.pt stays the best

wandb_log = False
wandb_project = "shakespeare-char"
wandb_run_name = "mini-gpt"

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2

learning_rate = 1e-3  # small models bear more
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99  # an iteration has few tokens, so the mean needs more of them
warmup_iters = 100
