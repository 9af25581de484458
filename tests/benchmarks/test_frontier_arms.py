"""The bench of the frontier at toy size: its wiring, its optimizer, its order of data and its score."""

import json
import math
import sys
from dataclasses import replace

import frontier_arms
import numpy as np
import pytest
import torch
from frontier.arms import TOY, TOY_A, parse_arm
from frontier.data import Order, Tokens, split_rows, toy_corpus, windows
from frontier.model import BOS, Frontier, Kind, attention, embed, exclusive, offset_keys, window_mask
from frontier.optimizer import Averages, Optimizer, decay_scale, even_out, rate_scale, update_matrices
from frontier.rounding import entropy_bits, gptq_integers, input_moments, integers
from frontier.train import prime, run_arm, score_all
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")
VOCABULARY = 258
SMALL = replace(TOY, layers=4, tokens=128, rows=(32,), seconds=0.05)
EVERYTHING = {
    "value_residual": True, "xsa": True, "key_offset": True, "rope_part": 0.5, "smear": True, "backout": 0.2, "dropout": 0.1,
    "qk_gain": 1.2, "head_gate": True, "skips": True,
}  # fmt: skip
ARMS = {
    "C": SMALL,
    "C with everything": replace(SMALL, activation="leaky2", **EVERYTHING),
    "A with everything": replace(SMALL, kv_heads=4, tied=False, values="tables", activation="swiglu", layers=5, **EVERYTHING),
    "windows off": replace(SMALL, pattern="L", values="none"),
}


def model_of(arm):
    """A model whose branches are not zero, as they are at the beginning."""
    model = Frontier(arm, VOCABULARY, CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in model.named_parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return model


@pytest.mark.parametrize("name", ARMS)
def test_a_later_token_changes_no_earlier_score(name):
    model = model_of(ARMS[name])
    tokens = torch.randint(2, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    for place in (1, 9, 31):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 7) % VOCABULARY
        before, after = model.logits(tokens), model.logits(changed)
        torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-5)
        assert not torch.allclose(before[:, place], after[:, place])


@pytest.mark.parametrize("name", ARMS)
def test_the_stream_stays_in_the_number_format_of_the_device(name):
    """A float32 weight that slips in unconverted would make every layer after it compute in float32."""
    model = model_of(ARMS[name])
    model.dtype = torch.bfloat16
    tokens = torch.randint(2, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    x0 = embed(tokens, model.top, torch.bfloat16)
    stream, _ = model._stream(tokens)
    assert (x0.dtype, stream.dtype) == (torch.bfloat16, torch.bfloat16)
    losses = model.losses(tokens, tokens)
    losses.mean().backward()
    assert losses.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for _, p in model.named_parameters())


def test_a_row_changes_no_other_row():
    model = model_of(ARMS["A with everything"])
    tokens = torch.randint(2, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    alone = model.logits(tokens[1:])
    torch.testing.assert_close(model.logits(tokens)[1:], alone, rtol=0, atol=1e-5)


def test_a_window_ends_with_the_token_itself():
    mask = window_mask(6, 3, CPU)
    assert [int(place) for place in mask[4].nonzero()] == [2, 3, 4]
    assert [int(place) for place in mask[0].nonzero()] == [0]


def test_short_layers_see_their_window_and_the_last_one_the_row():
    seen = [Frontier(replace(SMALL, layers=layers, pattern="SSSSL"), VOCABULARY, CPU) for layers in (10, 9)]
    assert [[layer for layer in range(m.arm.layers) if m.is_long(layer)] for m in seen] == [[4, 9], [4, 8]]


def test_the_models_have_the_weights_of_the_prototypes():
    with FakeTensorMode():  # shapes without memory
        counts = {name: sum(p.numel() for _, p in Frontier(parse_arm(name), 8192, CPU).named_parameters()) for name in ("C", "A")}
    assert {name: f"{count / 1e6:.1f}" for name, count in counts.items()} == {"C": "28.4", "A": "80.9"}


def test_value_residual_mixes_the_first_layers_values_in():
    """One token attends to itself alone, so with an identity after it the branch is the mixed values."""
    size = 4
    w = {name: nn.Parameter(torch.randn(size, size)) for name in ("q", "k", "v")}
    w |= {"o": nn.Parameter(torch.eye(size)), "value_keep": nn.Parameter(torch.tensor(0.9))}
    w["value_first"] = nn.Parameter(torch.tensor(0.1))
    h, v0 = torch.randn(1, 1, size), torch.randn(1, 1, 1, size)
    turn = torch.ones(1, 1, 2), torch.zeros(1, 1, 2)
    kind = Kind(size, "relu2", False, False, False)
    branch, own = attention(h, h, torch.zeros(1, 1, dtype=torch.long), v0, w, turn, None, kind)
    torch.testing.assert_close(own.flatten(), (w["v"] @ h.flatten()))
    torch.testing.assert_close(branch.flatten(), 0.9 * own.flatten() + 0.1 * v0.flatten())


def test_exclusive_attention_leaves_nothing_along_the_own_value():
    y, v = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    left = exclusive(y, v)
    torch.testing.assert_close((left * v.repeat_interleave(2, dim=1)).sum(-1), torch.zeros(1, 4, 3), rtol=0, atol=1e-5)


def test_offset_keys_come_from_the_token_before_in_what_is_not_rotated():
    k = torch.arange(12.0).view(1, 3, 1, 4)
    assert offset_keys(k, 2).flatten().tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 8, 9, 6, 7]


def test_a_smear_does_not_reach_into_another_document():
    model = model_of(replace(SMALL, smear=True))
    tokens = torch.tensor([[5, 6, BOS, 7]])
    other = torch.tensor([[5, 9, BOS, 7]])
    a, b = (embed(t, model.top, torch.float32) for t in (tokens, other))
    torch.testing.assert_close(a[:, 2:], b[:, 2:])
    changed_start = embed(torch.tensor([[8, 6, BOS, 7]]), model.top, torch.float32)
    assert not torch.allclose(a[:, 1], changed_start[:, 1])


@pytest.mark.parametrize("shape", [(6, 3), (3, 6)])
def test_normuon_brings_rows_to_one_size_and_keeps_the_norm(shape):
    update = torch.randn(2, *shape) * torch.rand(2, shape[0], 1)
    side = -1 if shape[0] >= shape[1] else -2
    evened, second = even_out(update, torch.zeros_like(update.mean(side, keepdim=True)))
    torch.testing.assert_close(evened.norm(dim=(1, 2)), update.norm(dim=(1, 2)))
    sizes = evened.square().mean(side)
    torch.testing.assert_close(sizes, sizes[:, :1].expand_as(sizes))
    torch.testing.assert_close(second, 0.05 * update.square().mean(side, keepdim=True))


@pytest.mark.parametrize("cautious", [False, True])
def test_cautious_decay_shrinks_only_where_the_step_does(cautious):
    params, grads = torch.randn(1, 4, 4), torch.randn(1, 4, 4)
    zero, number = torch.zeros(1, 4, 4), lambda value: torch.tensor(value)

    def after(decay):
        second = torch.zeros(1, 4, 1)
        return update_matrices(params, grads, zero, second, number(0.1), number(0.9), number(decay), False, cautious)[0]

    step, shrunk = params - after(0.0), after(0.0) - after(0.5)
    expected = 0.1 * 0.5 * params * ((step * params >= 0) if cautious else 1)
    torch.testing.assert_close(shrunk, expected, rtol=0, atol=1e-6)


def test_rates_and_decays_follow_the_time():
    assert [round(rate_scale(TOY, t), 3) for t in (0.0, 0.25, 0.625, 1.0)] == [1.0, 1.0, 0.525, 0.05]
    schedules = {name: [round(decay_scale(name, t), 3) for t in (0.0, 0.5, 1.0)] for name in ("falling", "constant", "rising")}
    assert schedules == {"falling": [1.0, 0.5, 0.0], "constant": [1.0] * 3, "rising": [1.0, 0.25, 1.25]}


def test_an_average_begins_with_the_weights_and_decays_per_step():
    p = nn.Parameter(torch.tensor([1.0]))
    averages = Averages([p], (0.5,), every=2)
    averages.update()
    with torch.no_grad():
        p.fill_(2.0)
    averages.update()
    assert averages.weights[0.5][0].item() == pytest.approx(0.25 * 1 + 0.75 * 2)


def numbered(documents):
    """A corpus in which every token is another number."""
    lengths = np.random.default_rng(0).integers(1, 40, documents)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Tokens(np.arange(lengths.sum(), dtype=np.uint16), starts, 1, VOCABULARY)


@pytest.mark.parametrize("kind", ["redrawn", "rows", "fixed"])
def test_each_token_comes_once_per_pass(kind):
    corpus, length = numbered(50), 16
    count = len(corpus.ids)
    order = Order(corpus, length, kind, 1, CPU)
    first = order.next(count // length)[:, :-1].flatten()
    assert len(first.unique()) == len(first)
    second = order.next((2 * count) // length - count // length)[:, :-1].flatten()
    seen = torch.bincount(torch.cat([first, second]), minlength=count)
    assert seen.max() == 2 and int((2 - seen).sum()) < length  # what is missing waits for the next pass
    assert order.passes == pytest.approx(2, abs=length / count)
    assert (torch.equal(first, second[: len(first)])) == (kind == "fixed" and count % length == 0)


def test_redrawn_rows_are_whole_documents_joined_and_follow_each_other():
    corpus, length = numbered(50), 16
    rows = Order(corpus, length, "redrawn", 1, CPU).next(len(corpus.ids) // length)
    before, after = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    jumps = after != before + 1
    starts = set(corpus.starts.tolist())
    seam = 1  # where the ring closes, and nowhere else, a document may begin in its middle
    assert sum(int(token) not in starts for token in after[jumps]) <= seam
    assert 30 < int(jumps.sum()) <= 51


def test_passes_and_seeds_are_drawn_differently_and_repeatably():
    corpus = numbered(50)
    one, same, other = (Order(corpus, 16, "redrawn", seed, CPU).next(70) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


def test_a_part_of_the_text_is_its_first_documents():
    corpus = numbered(50)
    tokens = Order(corpus, 16, "redrawn", 1, CPU, part=0.5).next(40)
    assert int(tokens.max()) < corpus.starts[25]


def test_rows_of_another_length_are_parts_of_the_same_rows():
    rows = torch.arange(18).view(2, 9)
    tokens, targets = split_rows(rows, 4)
    assert tokens.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert torch.equal(targets, tokens + 1)


def test_windows_predict_every_token_but_the_first_once():
    corpus = numbered(9)
    found = [targets.flatten()[counts] for _, targets, counts in windows(corpus, 8, 3, CPU)]
    assert torch.cat(found).tolist() == list(range(1, len(corpus.ids)))


def test_the_score_is_bits_over_the_bytes_of_the_text():
    """A head of zeros gives each of the 258 tokens the same probability."""
    train, validation = toy_corpus(10)
    model = model_of(replace(TOY_A, tokens=512))
    with torch.no_grad():
        model.top["head"].zero_()
    scores = score_all(model, Averages([], (), 4), model.arm, train, validation)
    assert scores["live"]["val_bpb"] == pytest.approx((len(validation.ids) - 1) * 8.0112 / validation.text_bytes, abs=1e-3)
    assert scores["live"]["train_nats"] == pytest.approx(math.log(VOCABULARY), abs=1e-3)


def test_throw_away_steps_leave_no_trace():
    tokens = torch.randint(2, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))
    found = []
    for primed in (False, True):
        model = Frontier(SMALL, VOCABULARY, CPU)
        optimizer = Optimizer(SMALL, model.named_parameters())
        if primed:
            prime(model, optimizer, SMALL, VOCABULARY)
        for step in range(3):
            model.losses(tokens, tokens).mean().backward()
            optimizer.step(step, 0.0)
        found.append(torch.cat([p.detach().flatten() for _, p in model.named_parameters()]))
    assert torch.equal(*found)


def test_rounding_counts_entropy_and_keeps_weights_within_half_a_step():
    assert entropy_bits(torch.tensor([0, 1, 2, 3] * 8)) == pytest.approx(64)
    weight = torch.randn(4, 500)
    values, scale = integers(weight, 6, 10.0)
    assert values.abs().max() <= 31
    assert ((values * scale - weight).abs() <= scale / 2 + 1e-6).all()
    torch.testing.assert_close(scale[:, 0], 10 * weight.std(1, unbiased=False) / 31, rtol=1e-3, atol=0)


def test_gptq_is_rounding_where_inputs_have_nothing_in_common_and_better_where_they_do():
    weight = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    apart, scale = gptq_integers(weight, 5, 6.0, torch.eye(300))
    nearest, same = integers(weight, 5, 6.0)
    assert torch.equal(apart, nearest) and torch.equal(scale, same)
    inputs = torch.randn(600, 20) @ torch.randn(20, 300) + 0.1 * torch.randn(600, 300)
    found, _ = gptq_integers(weight, 5, 6.0, inputs.T @ inputs)
    lost, by_rounding = (((values * scale - weight) @ inputs.T).square().mean() for values in (found, nearest))
    assert found.abs().max() <= 15 and lost < by_rounding / 4


def test_the_moments_of_a_matrix_are_those_of_what_it_multiplies():
    model = model_of(SMALL)
    tokens = torch.randint(2, VOCABULARY, (2, 32))
    found = input_moments(model, [tokens, tokens])
    large = {id(p) for _, p in model.named_parameters() if p.dim() == 2 and p.numel() >= 16_384}
    assert found.keys() == large and id(model.top["embedding"]) in large
    # The head sees normalised vectors: the mean square of each is 1.
    assert found[id(model.top["embedding"])].trace() == pytest.approx(2 * 64 * SMALL.width, rel=1e-3)


OPTIONS = [
    "toyA:head_gate=true,skips=true,xsa=true,activation=swiglu",
    "toy:normuon=false,cautious=false,decay_schedule=rising,dropout=0.1,part=0.5",
    "toy:rows=16/32/64,order=rows,tied=false,decay_schedule=constant,activation=leaky2",
    "toy:rope_part=0.5,key_offset=true,smear=true,backout=0.3,mix=1.1,qk_gain=1.5,softcap=30,value_residual=true,order=fixed",
]


@pytest.mark.parametrize("text", OPTIONS)
def test_every_option_runs_and_is_scored(text):
    arm = parse_arm(text, seconds=0.02, tokens=256, ema_from=0.0)
    result = run_arm(arm, *toy_corpus(10), CPU, lambda line: None)
    assert result["steps"] > 0 and result["passes"] > 0
    assert set(result["scores"]) == {"live", "0.9", "0.95"}
    assert all(math.isfinite(value) for found in result["scores"].values() for value in found.values())
    assert bool(result["rounded"]) == arm.score_rounded


def test_a_toy_learns():
    arm = replace(SMALL, layers=2, tokens=512)
    model = Frontier(arm, VOCABULARY, CPU)
    optimizer, order = Optimizer(arm, model.named_parameters()), Order(toy_corpus()[0], 32, "redrawn", 1, CPU)
    losses = []
    for step in range(15):
        loss = model.losses(*split_rows(order.next(16), 32)).mean()
        loss.backward()
        optimizer.step(step, 0.5)
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.3)
    assert losses[-1] < 3.2


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("B", "no base B"), ("C:laeyrs=2", "no setting laeyrs"), ("C:xsa=yes", "xsa=yes"), ("C:values=all", "values is one of"),
     ("C:tokens=1000", "multiple of 2048"), ("C:rows=3000/4096", "divide"), ("C:key_offset=true", "rope_part")],
)  # fmt: skip
def test_a_misspelt_arm_is_refused_by_name(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_arm(text)


def test_an_arm_overrides_the_defaults_of_the_command_line():
    arm = parse_arm("A:seconds=300,rows=1024/2048/4096,ema=0.95/0.98,xsa=true", seconds=60.0, seed=5)
    assert (arm.seconds, arm.seed, arm.rows, arm.ema, arm.xsa, arm.width) == (300, 5, (1024, 2048, 4096), (0.95, 0.98), True, 640)


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Run the program on the toy text; gives its results so far and what it printed."""

    def run(*arguments):
        results = tmp_path / "results.jsonl"
        monkeypatch.setattr(
            sys, "argv", ["frontier_arms.py", "--toy", "--seconds", "0.02", "--results", str(results), *arguments]
        )
        frontier_arms.main()
        return [json.loads(line) for line in results.read_text().splitlines()], capsys.readouterr().out

    return run


def test_a_failing_arm_leaves_its_error_and_the_next_one_runs(bench):
    results, said = bench("--arm", "toy:nothing", "--arm", "toy:rows=512,tokens=512,part=0.001", "--arm", "toy")
    failed, done = results
    assert "too few for rows of 512" in failed["error"]
    assert done["scores"]["live"]["val_bpb"] > 0 and done["arm"]["seconds"] == 0.02
    assert "REFUSED: toy:nothing: no setting nothing" in said and "FAILED" in said


def test_a_repeated_command_runs_only_what_is_missing(bench):
    bench("--arm", "toy")
    results, said = bench("--arm", "toy", "--arm", "toy:seed=2", "--arm", "toy:xsa=true,seconds=9000", "--limit", "9000")
    assert [found["arm"]["seed"] for found in results] == [1, 2]
    assert "toy | in " in said and "toy:xsa=true,seconds=9000 | left out" in said


def test_a_queue_waits_for_lines_that_come_later(tmp_path, monkeypatch):
    queue = tmp_path / "queue"
    lines = iter(["C\n# a remark\nA:se", "ed=2\n", "end\n"])

    def next_line_arrives(seconds):
        with queue.open("a") as file:
            file.write(next(lines))

    monkeypatch.setattr(frontier_arms.time, "sleep", next_line_arrives)
    assert list(frontier_arms.queued(queue)) == ["C", "A:seed=2"]
