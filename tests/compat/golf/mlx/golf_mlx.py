"""train_gpt_mlx.py run on toys, in this process."""

from __future__ import annotations

from golf_toys import Golf, Ran

# A step of 16 rows in two parts, each of which is read and computed in chunks of 5 and 3 rows.
MLX = {"GRAD_ACCUM_STEPS": "2", "MLX_MAX_MICROBATCH_TOKENS": "160", "VAL_BATCH_SIZE": "640", "VAL_LOSS_EVERY": "6"}
MLX |= {"ITERATIONS": "14", "WARMDOWN_ITERS": "8", "WARMUP_STEPS": "1", "TRAIN_LOG_EVERY": "1"}


class MLXGolf(Golf):
    """Runs train_gpt_mlx.py on the toys."""

    def __call__(self, code: int = 0, **given: str) -> Ran:
        return super().__call__(code, **MLX | given)
