"""The challenge's script for Macs, `train_gpt_mlx.py`: what it says and writes in another way than `train_gpt.py`."""
