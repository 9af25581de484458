"""Every setting of a run: its name, type, default and meaning.

This file, with data_section.py and evaluation_section.py beside it, is the one source of `--help`, the commented YAML of
`ingot init`, docs/configuration.md and the JSON schema. A field's description is its documentation: it says what the value does
and in which unit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ingot.config.checks import check
from ingot.model.settings import (
    Count,
    FileSettings,
    Fraction,
    FrontierSettings,
    GolfSettings,
    GPT2Settings,
    LlamaSettings,
    ModelSettings,
    Positive,
    Rate,
    Section,
    Seed,
    Size,
)

# The settings of `data`: which tokens a run reads, and in which order.


class PhaseSection(Section):
    """A stretch of the run with a mix of buckets of its own."""

    tokens: Positive = Field(
        description="Targets that are trained in this phase; the next begins with the first step after them. The last never ends."
    )
    mix: dict[str, Rate] = Field(description="The weight of each bucket, as in data.mix.")


class DataSection(Section):
    """Which tokens are read, and in which order."""

    path: str = Field(
        "sample:shakespeare",
        description="Folder that `ingot data prepare` made, {train,val}/BUCKET/ with .bin and .idx or with .jsonl, one .jsonl "
        "file, or sample:shakespeare for the text inside the package; sample:shakespeare+bpe:2048 has that tokenizer where "
        "data.tokenizer is null.",
    )
    tokenizer: str | None = Field(
        None,
        description="Tokenizer for a bundled sample, .jsonl or .bin with .idx: byte, char, bpe:N (byte-level BPE with N ids "
        "that are learned from the training text), gpt2, a file (.model or tokenizer.json) or a hub name; null: byte for a "
        "sample. A prepared folder brings its own; if both are given they must agree.",
    )
    trust_tokens: bool = Field(
        False,
        description="Take the tokens of other programs' files as they are. false: refuse them where the tokenizer, given their "
        "text, makes other ones; true is for tokens that were drawn at random and for tokenizers that lose text.",
    )
    seq_len: Size = Field(256, description="Tokens in a training row.")
    sampling: Literal["shuffle", "redraw", "random", "stream", "pack", "document"] = Field(
        "shuffle",
        description="shuffle: every window of seq_len tokens once per epoch, in an order drawn anew each epoch. redraw: "
        "documents in an order drawn anew each epoch, joined, cut into rows from a random place on, and the rows shuffled; every "
        "token once per epoch. random: windows that start anywhere, drawn with replacement. stream: the tokens in their order, "
        "from the first to the last and again. pack: whole documents in an order drawn anew each epoch, fitted into rows; longer "
        "ones are cut. document: the same with one document in a row, the rest of which is empty.",
    )
    overlap: Count = Field(
        0,
        description="pack, document: a document longer than a row is cut into pieces that begin with this many tokens of the "
        "piece before, which are not predicted again. At most half of seq_len.",
    )
    epochs: Positive | None = Field(
        None, description="The run ends when the data has been read this often. null: it is read again and again."
    )
    mix: dict[str, Rate] = Field(
        {},
        description="The weight of each bucket: {web: 3, books: 1} draws three rows of four from web. A bucket without a weight "
        "is not read. Empty: every token once per epoch, whatever its bucket.",
    )
    phases: list[PhaseSection] = Field(
        [], description="Mixes that follow one another, instead of data.mix; each bucket goes on where it stood."
    )
    exhausted: Literal["halt", "renormalise"] = Field(
        "halt",
        description="What happens when data.epochs of a bucket are over and the mix asks for more of it. halt: the run saves and "
        "ends as `halted`. renormalise: the other buckets share its weight.",
    )
    already_read: str | None = Field(
        None,
        description="pack, document: a file that lists documents which another program has read, as `gpt-simple train` writes it "
        "when it goes on with a run of the original. They are left out of the first epoch.",
    )
    spans: Positive | Annotated[list[Positive], Field(min_length=1)] = Field(
        1,
        description="stream: equal parts a step is read in, each of which begins one token after the last target of the one "
        "before. A list: the rows of one part after the other, again and again until the step is full.",
    )
    document_mask: bool = Field(
        False, description="Tokens see only their own document, in training and in evaluation. false: the whole row before them."
    )
    seed: Seed = Field(1337, description="Decides the order of the rows and nothing else.")


# The settings of `evaluation`: how the model is judged while and after it trains.


class EvaluationSection(Section):
    """How the model is judged while and after it trains."""

    every: Count = Field(0, description="Steps between evaluations. 0: only at the end.")
    at_start: bool = Field(False, description="Evaluate before the first step too.")
    at_end: bool = Field(True, description="Evaluate when the run is complete.")
    rows: Positive | None = Field(
        None,
        description="Rows of the validation split an evaluation during training reads. null: all. The last evaluation reads "
        "final_rows.",
    )
    final_rows: Positive | Literal["auto"] | None = Field(
        "auto",
        description="Rows that the last evaluation and the artifact's scoring read, spread evenly over the validation split. "
        "null: all. auto: all, unless budget.seconds is set, budget.artifact_bytes is not, and all would take longer than 10 "
        "seconds and half the budget: then as many as that time allows, in evaluations during training too, which also "
        "take no longer in all than the training. A score of a part says so.",
    )
    train_rows: Positive | None = Field(
        None, description="Rows of the training split that are scored beside the validation split. null: none."
    )
    whole_rows: bool = Field(
        False, description="Leave out the last row where the text does not fill it. false: score every token."
    )
    stride: Positive | None = Field(
        None,
        description="Tokens from one validation row to the next. null: data.seq_len, rows that do not overlap. Less: each row "
        "scores only its last `stride` tokens, which see more context; takes seq_len / stride times as long.",
    )
    micro_batch: Positive = Field(64, description="Rows in one forward pass of one rank.")
    bytes: Literal["text", "pieces"] = Field(
        "text",
        description="What val_bpb divides by. text: the UTF-8 bytes of the original text, as preparation counted them. pieces: "
        "the bytes of the tokenizer's pieces, as golf counts them. The other is reported beside it where it differs.",
    )
    sample_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = Field(
        0, description="Tokens of sample text written at each evaluation, into samples/. 0: no samples."
    )
    sample_prompt: str = Field("", description="What the samples begin with. Empty: the start of a document.")
    temperature: Rate = Field(0.8, description="Temperature of the samples.")
    top_k: Count = Field(0, description="Samples are drawn from this many most likely tokens. 0: from all.")
    tasks: str | list[str] | None = Field(
        None,
        description="Tasks that every evaluation scores too, as `ingot eval --tasks` does: hellaswag, lambada, arc_easy, "
        "arc_challenge, piqa, winogrande, blimp; several with commas between them, or a list. null: none.",
    )
    task_data: str | None = Field(
        None,
        description="Folder with the files of the tasks, see docs/tasks.md. null: they are fetched from the Hugging Face hub.",
    )
    task_items: Positive | None = Field(100, description="Items of each file that are scored, the first ones. null: all.")
    task_truncate: bool = Field(
        False, description="Cut the beginnings of tasks' texts that the model does not see whole. false: such texts are an error."
    )


# The model section of a config: the settings of one of the model families, and the kernels that parts of them can use.


def _family(section: Any) -> str:
    if isinstance(section, dict):
        return "file" if section.get("file") is not None else str(section.get("family", "gpt2"))
    return str(getattr(section, "family", section))


AnyModel = Annotated[
    Annotated[GPT2Settings, Tag("gpt2")]
    | Annotated[LlamaSettings, Tag("llama")]
    | Annotated[GolfSettings, Tag("golf")]
    | Annotated[FrontierSettings, Tag("frontier")]
    | Annotated[FileSettings, Tag("file")],
    Discriminator(_family),
]
FAMILIES: dict[str, type[ModelSettings]] = {
    "gpt2": GPT2Settings,
    "llama": LlamaSettings,
    "golf": GolfSettings,
    "frontier": FrontierSettings,
    "file": FileSettings,
}
Kernel = Literal["loss", "rotary", "qkv", "mlp", "gate", "scales", "stream"]


GPT2_IDS, GPT2_ROWS = 50257, 50304  # of its vocabulary, and of an embedding that is rounded up to a multiple of 64
Momentum = Annotated[float, Field(ge=0, lt=1)]


class GroupSection(Section):
    """Parameters with an optimizer and rates of their own."""

    name: Annotated[str, Field(min_length=1)] = Field(description="What the group is called, in training.stages too.")
    match: Annotated[str, Field(min_length=1)] = Field(
        description="Pattern of the names of its parameters: * is any text, ? a letter, [qk] one of these. The first group whose "
        "pattern fits takes a parameter."
    )
    optimizer: Literal["adamw", "muon"] = Field("adamw", description="Muon takes matrices only.")
    learning_rate: Rate | None = Field(
        None, description="Peak learning rate. null: optimizer.learning_rate, or muon_learning_rate with muon."
    )
    momentum: Momentum | None = Field(None, description="muon: momentum after its warm-up. null: optimizer.muon_momentum.")
    weight_decay: Rate | None = Field(
        None,
        description="Decoupled weight decay of all of them, gains and biases too. null: optimizer.weight_decay, or "
        "muon_weight_decay with muon.",
    )
    beta1: Momentum | None = Field(None, description="adamw: null: optimizer.beta1.")
    beta2: Momentum | None = Field(None, description="adamw: null: optimizer.beta2.")
    epsilon: Rate | None = Field(None, description="adamw: null: optimizer.epsilon.")


class OptimizerSection(Section):
    """How gradients become updates, and how the learning rate moves."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw for everything, or muon: Muon for the matrices inside the blocks, AdamW for the rest."
    )
    learning_rate: Rate = Field(6e-4, description="Peak learning rate of AdamW.")
    embedding_learning_rate: Rate | None = Field(
        None, description="Peak learning rate of the token and position embeddings. null: learning_rate."
    )
    head_learning_rate: Rate | None = Field(
        None, description="Peak learning rate of a head that is not tied to the embedding. null: learning_rate."
    )
    scalar_learning_rate: Rate | None = Field(
        None, description="Peak learning rate of what is not a matrix of a layer: gains, biases, mixes. null: learning_rate."
    )
    weight_decay: Rate = Field(0.1, description="Decoupled weight decay of AdamW, on tensors of two or more dimensions.")
    beta1: Momentum = Field(0.9, description="AdamW: decay of the mean of gradients.")
    beta2: Momentum = Field(0.95, description="AdamW: decay of the mean of squared gradients.")
    epsilon: Rate = Field(1e-8, description="AdamW: added to the root of the second moment.")
    clip_norm: Rate = Field(1.0, description="Gradients are scaled down to this global norm. 0: never.")
    muon_learning_rate: Rate = Field(0.02, description="Peak learning rate of Muon.")
    muon_weight_decay: Rate = Field(0.0, description="Decoupled weight decay of Muon.")
    muon_weight_decay_schedule: Literal["constant", "falling", "rising"] = Field(
        "constant",
        description="Muon: its weight decay over the budget, besides the learning rate's schedule. falling: in a line to 0. "
        "rising: to a quarter at half of the budget and up to 1.25 of it at the end.",
    )
    muon_cautious: bool = Field(False, description="Muon: decay only weights that the update brings nearer to 0 as well.")
    muon_beta2: Momentum | None = Field(
        None,
        description="NorMuon: divide the rows of an update (of a wide matrix the columns) by a running root mean square that "
        "forgets at this rate; the length of the whole stays. null: plain Muon.",
    )
    muon_momentum: Momentum = Field(0.95, description="Muon: momentum.")
    muon_momentum_start: Momentum | None = Field(
        None, description="Muon: momentum of the first step, from which it moves to muon_momentum. null: no warm-up."
    )
    muon_momentum_warmup_steps: Count = Field(0, description="Muon: steps over which the momentum moves, in a line.")
    muon_nesterov: bool = Field(True, description="Muon: Nesterov momentum.")
    muon_iterations: Annotated[int, Field(ge=1, le=100)] = Field(5, description="Muon: iterations of the orthogonalisation.")
    muon_coefficients: Literal["newton-schulz", "polar-express"] = Field(
        "newton-schulz",
        description="Muon: newton-schulz has the same polynomial in every iteration; polar-express a better one for each.",
    )
    muon_normalise_rows: bool = Field(False, description="Muon: every row of an update is brought to the same length.")
    muon_precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="Muon: arithmetic of the orthogonalisation. auto: bf16 on GPUs, fp32 on CPUs."
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="Keep an average of the weights that forgets at this rate per step, and evaluate, sample and export it. "
        "null: the weights themselves.",
    )
    schedule: Literal["constant", "cosine", "wsd", "budget", "warmdown"] = Field(
        "cosine",
        description="After the warm-up: constant; cosine down to the floor over decay_steps; wsd: constant, then linear over "
        "the last decay_steps; budget: constant, then linear over the last decay_fraction of the budget (seconds "
        "or steps, whichever is further along), landing on its end; warmdown: constant, then linear over the last decay_steps "
        "of the steps or, with budget.seconds, over the time that many steps have taken on average.",
    )
    warmup_steps: Count = Field(0, description="The learning rate rises linearly over this many steps.")
    decay_steps: Positive | None = Field(
        None,
        description="cosine: step at which the floor is reached (null: max_steps). wsd: length of the final decay (null: a "
        "fifth of max_steps).",
    )
    decay_fraction: Fraction = Field(0.5, description="budget: part of the budget that is spent decaying.")
    floor: Fraction = Field(0.1, description="The learning rate ends at this fraction of its peak and stays there.")
    groups: list[GroupSection] = Field(
        [], description="Parameters, by name, with an optimizer and rates of their own; the others are sorted by their kind."
    )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The groups of the parameters that no entry of `groups` takes."""
        return ("embedding", "head", "matrix", *(["rest"] if self.name == "muon" else []), "scalar")


class StageSection(Section):
    """A stretch of the run with a batch, a row length and rates of its own."""

    share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Part of the budget (seconds or steps, whichever is further along) that the stage lasts. The shares of all "
        "stages add up to 1.",
    )
    steps: Positive | None = Field(
        None, description="Steps that the stage lasts, instead of a share. The last stage goes on to the end of the run."
    )
    tokens_per_step: Positive | None = Field(
        None, description="Tokens in one step, a multiple of data.seq_len. null: training.tokens_per_step."
    )
    seq_len: Positive | None = Field(
        None, description="Tokens in a row: data.seq_len, which is the longest, or a divisor of it. null: data.seq_len."
    )
    rate: Rate = Field(1.0, description="Factor on every learning rate, besides the schedule's.")
    rates: dict[str, Rate] = Field({}, description="Factors on the learning rates of single groups: {matrix: 0.5}.")
    model: dict[str, int | float] = Field(
        {},
        description="Numbers that the model is given by its method `set`: {window: 128}. Evaluation, samples and the exported "
        "model have those of the last stage.",
    )


class TrainingSection(Section):
    """How long, in what portions, on what machine, and where the results go."""

    max_steps: Count | None = Field(None, description="Optimizer steps. null: until budget.seconds are spent.")
    tokens_per_step: Positive = Field(
        16384,
        description="Tokens in one optimizer step over all ranks; accumulation follows from it, the micro-batch and the ranks.",
    )
    stages: list[StageSection] = Field(
        [], description="Stages with a batch, a row length and rates of their own, one after the other. Empty: one for all."
    )
    micro_batch: Positive | Literal["auto"] = Field(
        "auto",
        description="Rows in one forward pass of one rank. auto: on a GPU the least of the step's halves, quarters and so on "
        "that is hardly slower than the fastest that fits, as tried; elsewhere as many as the step has, at most 16,384 tokens.",
    )
    seed: Seed = Field(1337, description="Decides the initial weights and dropout.")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N, mps or mlx. auto: the best one of torch's.")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto",
        description="Threads of a rank on a CPU; another number rounds differently. auto: what OMP_NUM_THREADS says, else as "
        "many as are fastest here when the run begins, which it keeps.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto",
        description="Arithmetic of forward and backward; weights stay float32. auto: bf16 on GPUs that have it, fp16 on older "
        "ones, else fp32.",
    )
    compile: bool | Literal["auto", "blocks"] = Field(
        "auto",
        description="torch.compile. true: the whole model. blocks: each block and the loss by themselves, which shortens the "
        "time before the first step and may make steps a little slower. auto: the whole model, on CUDA only, where it pays.",
    )
    compile_optimizer: bool | Literal["auto"] = Field(
        "auto", description="Compile Muon's step on CUDA: fewer kernels, a longer start. auto: NorMuon's, where the model is."
    )
    cuda_graphs: bool | Literal["auto"] = Field(
        "auto",
        description="Record the passes of a compiled model once and replay them, on one CUDA device: a short step then does not "
        "wait for the host to launch its kernels. Takes more memory. auto: steps of at most 32,768 tokens, of models of "
        "ours with at most 200 million weights, without stages, document_mask and deterministic.",
    )
    deterministic: bool = Field(
        False,
        description="On a GPU too, compute the same bits each time: the same run twice, or stopped and continued, with the same "
        "micro_batch. Slower, and only the gpt2 family is compiled; a CPU does so anyway, with the same threads.",
    )
    loss_chunk: Positive | None = Field(
        None,
        description="Tokens whose logits are held at once. null: those of the whole micro-batch; less needs less memory and a "
        "little more time.",
    )
    kernels: Literal["auto", "off"] | list[Kernel] = Field(
        "auto",
        description="Kernels of our own, on NVIDIA GPUs in bf16. loss: softcap, loss and its gradient in one pass over the "
        "logits; rotary: norm, rotation and gain of queries and keys in one; qkv: one product for queries, keys and values of "
        "golf and llama, with FlashAttention 4; mlp: the activation of golf, frontier and gpt2 in the products around it; gate: "
        "llama's, on Hopper with the extra flash; scales: those of golf's branches in their weights; stream: the residual stream "
        "of gpt2 and llama in bf16. A list: these. auto: those that run here; where a GPU has at most 32,768 tokens of a step "
        "and no cuda_graphs loss, scales and stream alone: it would wait for the others' launches. off: none.",
    )
    fp8_head: bool = Field(
        False,
        description="Products of the head and its gradients in 8 bits with fixed scales, on NVIDIA GPUs from 8.9 on: faster for "
        "a large vocabulary, and coarser. Weights and evaluation stay as they are.",
    )
    gradient_checkpointing: bool | Positive | Literal["auto"] = Field(
        False,
        description="true: keep only block inputs and recompute the rest in the backward pass: less memory, a third more time. A "
        "number k: in every k-th block alone, for a k-th of both. MLX recomputes every block. auto: in every block where a "
        "micro-batch would else fill three quarters of the device's memory, by an estimate; no block of a model of one's own.",
    )
    ddp_python_reducer: bool = Field(
        False,
        description="Compiled and on several ranks: send gradients while others are still computed by torch's reducer in Python, "
        "which goes together with gradient checkpointing and document masks. false: with these they are sent at the end.",
    )
    eager: bool = Field(
        True, description="mlx: compute each micro-batch before the next. false: a step as a whole, which takes more memory."
    )
    priming_steps: Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = Field(
        "auto",
        description="Steps taken and undone before the clock starts, so that compilation and cold caches are not paid from "
        "the budget. auto: 2 where the model is compiled, else none.",
    )
    weights: str | None = Field(
        None,
        description="Start from the weights of this run folder, checkpoint or artifact. null: from random ones. A run that is "
        "continued has its own.",
    )
    output_dir: str | None = Field(
        None, description="The run folder. null: runs/<recipe>-<time>. An unfinished run found there is continued."
    )
    resume: Literal["auto", "never"] | str = Field(
        "auto",
        description="auto: continue from the newest sound checkpoint of output_dir. never: refuse a folder that holds one. The "
        "path of a checkpoint, or of another run: copy its state into output_dir and go on there.",
    )
    max_runtime_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="Wall-clock seconds of this session, everything included: it saves and stops before they are over. null: "
        "what SLURM_JOB_END_TIME, INGOT_MAX_RUNTIME or GPT_SIMPLE_MAX_RUNTIME says, else no end.",
    )
    walltime_reserve_seconds: Rate | None = Field(
        None,
        description="Seconds of the wall clock that are kept for the last save. null: twice the longest save so far, and at "
        "least 30 s or a tenth of the session.",
    )
    save_every: Count = Field(0, description="Steps between checkpoints. 0: by save_seconds alone.")
    save_seconds: Rate = Field(300.0, description="Seconds between checkpoints. 0: by save_every alone.")
    keep_last: Positive | None = Field(
        2,
        description="Newest regular checkpoints that are kept, besides the newest of a stop and of a completed run, the best one "
        "and milestones. null: all are kept.",
    )
    keep_every: Count = Field(0, description="Checkpoints at multiples of this step are milestones and never deleted. 0: none.")


class BudgetSection(Section):
    """What the run may cost."""

    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Training seconds over all resumes; evaluation, saving and set-up are not counted. null: no limit."
    )
    overshoot: bool = Field(
        False, description="Take the step in which the seconds run out. false: no step begins that would not end in time."
    )
    artifact_bytes: Positive | None = Field(None, description="Largest size of the exported model in bytes. null: no limit.")


Spreads = Annotated[float, Field(gt=0, le=1000)]


class ArtifactSection(Section):
    """What is left for others when the run is complete."""

    write: bool = Field(True, description="Write the artifact at the end of the run.")
    score: bool = Field(True, description="Read the artifact again in a process of its own and report its bits per byte.")
    quantiser: Literal["none", "int8", "int8-golf", "std", "gptq"] = Field(
        "int8",
        description="none: weights as dtype says. int8: large matrices as a byte per weight and a scale per row. int8-golf: the "
        "same by the golf challenge's own rule, whose scales are never below 1/127. std: codes of `bits` bits whose steps follow "
        "from the spread of a row, rounded to the nearest. gptq: the same steps, and each matrix rounded so that its products "
        "change least on training text.",
    )
    bits: int = Field(6, ge=2, le=8, description="Of the codes of matrices, with std and gptq.")
    k: Spreads | Literal["auto"] = Field(
        "auto",
        description="The largest code stands for so many times the spread of its row: a smaller k is finer and has more bytes. "
        "auto: the finest steps with which the file fits into budget.artifact_bytes, with more bits where fine steps need them; "
        "without that limit 8.",
    )
    embedding_bits: int = Field(8, ge=2, le=8, description="The same of embeddings, tables and the head.")
    embedding_k: Spreads | Literal["auto"] = Field(
        "auto",
        description="The same of embeddings, tables and the head. auto: with a limit and k auto, what scores best on training "
        "text; otherwise 5.",
    )
    codec: Literal["none", "zlib", "lzma", "rans"] = Field(
        "lzma",
        description="Compression of the whole file. rans: an entropy coder, the smallest where weights are codes of few bits.",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Number format of weights that are not quantised, where the quantiser is none."
    )
    tokenizer: bool = Field(
        True, description="Put the tokenizer into the artifact, so that it writes text by itself. false: saves its bytes."
    )


class TrackingSection(Section):
    """What is recorded while the run goes on."""

    log_every: Positive = Field(
        10, description="Steps between lines of metrics.jsonl and log.txt. The first ten steps are always recorded."
    )
    heartbeat_seconds: Annotated[float, Field(gt=0, le=3600)] = Field(5.0, description="Seconds between updates of state.json.")
    wandb_project: str | None = Field(
        None,
        description="Project of Weights & Biases that gets the numbers too, one run there for all sessions of a run; needs the "
        "extra `wandb`. null: none.",
    )
    wandb_run_name: str | None = Field(None, description="Name of the run there. null: that of the run folder.")
    wandb_mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline: keep the numbers in the run folder until `wandb sync`. null: what WANDB_MODE says, else online.",
    )
    trackio_project: str | None = Field(
        None,
        description="Project of trackio, in its store on this machine, that gets the numbers too under the name of the run "
        "folder and a few letters; needs the extra `trackio`. null: none.",
    )
    tensorboard: bool = Field(
        False, description="Write the numbers as TensorBoard's events too, into tensorboard/; the extra `tensorboard` shows them."
    )


class Config(Section):
    """One run, completely."""

    model: AnyModel = Field(default_factory=GPT2Settings)
    data: DataSection = Field(default_factory=DataSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    training: TrainingSection = Field(default_factory=TrainingSection)
    budget: BudgetSection = Field(default_factory=BudgetSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    artifact: ArtifactSection = Field(default_factory=ArtifactSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="after")
    def _parts_fit(self) -> Config:
        check(self)
        return self

    @property
    def stride(self) -> int:
        """Tokens from one validation row to the next."""
        return self.evaluation.stride or self.data.seq_len

    @property
    def fitting_tokenizer(self) -> str:
        """The tokenizer with which text for this config is prepared, for advice to those who have no data for it yet."""
        return self.data.tokenizer or ("gpt2" if (self.model.vocab_size or 0) >= GPT2_IDS else "byte")

    @property
    def rows_per_step(self) -> int:
        return self.training.tokens_per_step // self.data.seq_len
