"""The commands that work, which cases start from. Names are those of world.py; `new` is what a command makes."""

from __future__ import annotations

from importlib.util import find_spec

from ingot.compat.golf.main import main as golf
from ingot.compat.golf.mlx_script import main as golf_mlx
from ingot.compat.nanogpt.bench import main as bench
from ingot.compat.nanogpt.sample import main as sample
from ingot.compat.nanogpt.train import main as nanogpt

from .commands import (
    SETTINGS,
    Scenario,
    of_golf,
    of_gpt_simple,
    of_ingot,
    of_nanogpt,
    prepare_characters,
    prepare_documents,
    python_generate,
    python_train,
    with_settings,
)
from .world import GOLF, NANOGPT, TINY, words

TRAIN = tuple(words(TINY))
NEW = (*TRAIN, "--training.output_dir=new")
MORE = "--training.max_steps=3"  # of a run with two steps
GPTS = ("--data.path=gpts/data", "--data.tokenizer=gpts/tok", "--data.mix={web: 1, books: 2}")
RUNS = tuple(f"runs/{name}" for name in ("gpt2", "llama", "golf", "own"))
EXPORTS = tuple(f"exports/{name}" for name in ("none.safetensors", "zlib.ingot", "lzma.ingot", "rans.ingot"))
TEXTS = ("a.txt", "a.md", "a.jsonl", "a.json", "a.csv", "a.tsv", "b.jsonl.gz", "c.txt.xz")
SHARDS = "golf/data/datasets/toy --tokenizer golf/data/tokenizers/toy.model"
FEW = "--tokens 4 --device cpu"
FEW_NEW = "--max-new-tokens 4 --device cpu"
NANOGPT_TRAIN = tuple(words(NANOGPT))
NANOGPT_SAMPLE = ("--out_dir=out", "--num_samples=1", "--max_new_tokens=4", "--device=cpu")
NANOGPT_BENCH = (
    "--real_data=False", "--device=cpu", "--n_layer=1", "--n_head=2", "--n_embd=8", "--block_size=8", "--batch_size=1",
    "--mfu_peak=1e12",
)  # fmt: skip
GPTS_TRAIN = "train --config config.yaml --training.device cpu"
# A model of one's own says itself what these say.
OWN_GOLF = {name: value for name, value in GOLF.items() if name != "NUM_KV_HEADS"} | {"MODEL_FILE": "../mine.py"}
SCORE_GOLF = {**GOLF, "EVAL_ONLY_PATH": "final_model.int8.ptz"}

SETTING_FILES = (
    with_settings("config show", "config.yaml", "data", then=TRAIN, weight=8),
    with_settings("config show --config config.yaml", "config.yaml", weight=6),
    with_settings("config show --recipe demo --json", weight=2),
    with_settings("validate", "data", then=TRAIN, told=(1, 2), weight=8),
    with_settings("validate --config config.yaml", "config.yaml", "data", told=(1, 2), weight=4),
    with_settings("validate --config config.yaml", "gpts", at="gpts", told=(1, 2), weight=2),
    of_ingot("config schema"),
    of_ingot("init -o new.yaml"),
    of_ingot("recipes"),
    of_ingot("recipes show demo"),
)
TRAINING = (
    with_settings("train", "data", then=NEW, weight=14),
    with_settings("train --data.sampling=pack --model.family=llama", "data", then=NEW, weight=5),
    with_settings("train --model.family=golf --model.kv_heads=1 --optimizer.name=muon", "data", then=NEW, weight=4),
    with_settings("train --config config.yaml --training.output_dir=new", "config.yaml", "data", weight=5),
    with_settings("train --model.file=mine.py", "data", "mine.py", then=NEW, weight=10),
    with_settings("train", "chars", then=(*NEW, "--data.path=chars"), weight=3),
    with_settings("train", "gpts", then=(*NEW, *GPTS), weight=4),
    with_settings("train", "lines", then=(*NEW, "--data.path=lines", "--data.tokenizer=byte"), weight=2),
    with_settings(
        "train --optimizer.ema_decay=0.5 --training.output_dir=runs/gpt2",
        "runs/gpt2",
        "data",
        then=(*TRAIN, MORE),
        writes=("runs/gpt2",),
        weight=8,
    ),
    with_settings(f"train runs/llama {MORE}", "runs/llama", "data", writes=("runs/llama",), weight=4),
    with_settings("train --training.weights=exports/zlib.ingot", "exports/zlib.ingot", "data", then=NEW, weight=2),
    Scenario("python", python_train, NEW, ("data",), settings=SETTINGS, weight=3),
)
MODELS = (
    *(of_ingot(f"eval {run} --rows 2 --device cpu", run, "data", weight=2) for run in RUNS),
    *(of_ingot(f"eval --artifact {path} --data data --rows 2 --device cpu", path, "data", weight=2) for path in EXPORTS),
    *(of_ingot(f"generate {path} {FEW}", path, "data", weight=2) for path in (*RUNS, *EXPORTS[:3])),
    of_ingot(f"generate runs/gpt2 --prompts-file prompts.jsonl {FEW}", "runs/gpt2", "data", "prompts.jsonl", weight=2),
    of_ingot("export runs/gpt2 --no-score -o new.ingot", "runs/gpt2", "data", weight=3),
    of_ingot("export runs/gpt2 --format huggingface -o new", "runs/gpt2", "data"),
    of_ingot("export runs/gpt2 --format nanogpt -o new.pt", "runs/gpt2", "data"),
    of_ingot("export runs/llama --format gpt-simple -o new", "runs/llama", "data"),
    of_ingot("export exports/lzma.ingot --no-score --codec none -o new.safetensors", "exports/lzma.ingot", "data"),
    of_ingot("import exports/huggingface -o new.safetensors", "exports/huggingface", weight=4),
    of_ingot("import nanogpt-run/out/ckpt.pt -o new.safetensors", "nanogpt-run", weight=4),
    of_ingot("import gpts-run/out -o new.safetensors", "gpts-run", weight=3),
    of_ingot("status runs/gpt2", "runs/gpt2", weight=4),
    of_ingot("status --json", "runs/gpt2", "runs/llama", weight=2),
    of_ingot("stop runs/gpt2", "runs/gpt2", writes=("runs/gpt2",), code=1),
    Scenario("python", python_generate, ("exports/zlib.ingot", "ab"), ("exports/zlib.ingot",), weight=2),
)
DATA = (
    *(of_ingot(f"data prepare --input text/{one} --tokenizer byte --output new --workers 1", "text", weight=2) for one in TEXTS),
    *(
        of_ingot(f"data prepare --input text/a.jsonl --tokenizer {one} --output new --workers 1", "text", "tokenizers", weight=3)
        for one in ("tokenizers/bytes.json", "tokenizers/llama.json", "tokenizers/toy.model")
    ),
    of_ingot("data verify data", "data", told=(3,), weight=5),
    of_ingot("data verify chars", "chars", told=(3,), weight=2),
    of_ingot(f"data verify {SHARDS}", "golf", told=(3,), code=3, weight=3),
    of_ingot("data inspect data", "data", weight=4),
    of_ingot(f"data inspect {SHARDS}", "golf", weight=2),
    of_ingot("data convert data --to shards --output new", "data", weight=3),
    of_ingot("data convert data --to nanogpt --output new", "data", weight=2),
    of_ingot("data convert data --to gpt-simple --output new", "data", weight=2),
    of_ingot("data convert gpts/data --to ingot --tokenizer gpts/tok --output new", "gpts", weight=4),
    of_ingot("data convert nanogpt/data/words --to ingot --output new", "nanogpt", weight=4),
    of_ingot(f"data convert {SHARDS} --to ingot --output new", "golf", weight=4),
    of_ingot("data train-tokenizer --input text/a.txt --kind bpe --vocab-size 300 --output new.json", "text", weight=2),
    of_ingot("data train-tokenizer --input text/a.txt --kind sentencepiece --vocab-size 300 --output new.model", "text"),
    of_ingot("golf pack golf-run/logs/toy --output new", "golf-run", weight=3),
    Scenario("prepare.py", prepare_characters, ("--input", "text/a.txt"), ("text",), weight=2),
    Scenario("prepare.py", prepare_documents, ("--input", "text/a.jsonl", "--workers", "1"), ("text",), weight=2),
)
OTHER_DOORS = (
    of_golf("train_gpt.py", golf, GOLF, weight=16),
    of_golf("train_gpt.py", golf, SCORE_GOLF, at="golf-run", writes=("golf-run/logs",), weight=4),
    of_golf("train_gpt.py", golf, OWN_GOLF, weight=4),
    of_golf("train_gpt_mlx.py", golf_mlx, GOLF, code=0 if find_spec("mlx.core") else 2, weight=3),
    of_nanogpt("train.py", nanogpt, (*NANOGPT_TRAIN, "--out_dir=new"), weight=12),
    of_nanogpt("train.py", nanogpt, ("../preset.py", *NANOGPT_TRAIN, "--out_dir=new"), weight=4),
    of_nanogpt(
        "train.py",
        nanogpt,
        (*NANOGPT_TRAIN, "--out_dir=out", "--init_from=resume", "--max_iters=2"),
        at="nanogpt-run",
        writes=("nanogpt-run/out",),
        weight=5,
    ),
    of_nanogpt(
        "train.py",
        nanogpt,
        (*NANOGPT_TRAIN, "--out_dir=../runs/gpt2", "--init_from=resume", "--max_iters=3"),
        "runs/gpt2",
        writes=("runs/gpt2",),
        weight=3,
    ),
    of_nanogpt("sample.py", sample, NANOGPT_SAMPLE, at="nanogpt-run", weight=6),
    of_nanogpt("bench.py", bench, NANOGPT_BENCH, weight=2),
    of_gpt_simple(GPTS_TRAIN, "gpts", keys=True, weight=12),
    of_gpt_simple(f"{GPTS_TRAIN} {MORE}", "gpts-run", keys=True, writes=("gpts-run/out",), weight=5),
    of_gpt_simple("validate --config config.yaml", "gpts", keys=True, told=(1, 2), weight=6),
    of_gpt_simple(f"generate --output-dir out --prompt ab {FEW_NEW}", "gpts-run", weight=4),
    of_gpt_simple(f"batch-generate --input ../prompts.jsonl --output-dir out {FEW_NEW}", "gpts-run", "prompts.jsonl", weight=3),
    of_gpt_simple(
        "tokenize --input_dir ../lines/train/web --output_dir new --tokenizer_path tok --min_text_length 1",
        "gpts",
        "lines",
        weight=3,
    ),
    of_gpt_simple("status --output_dir out", "gpts-run", weight=2),
    of_gpt_simple("stop --output_dir out", "gpts-run", writes=("gpts-run/out",)),
    of_gpt_simple("init -o new.yaml", "gpts"),
)
SCENARIOS: tuple[Scenario, ...] = (*SETTING_FILES, *TRAINING, *MODELS, *DATA, *OTHER_DOORS)
