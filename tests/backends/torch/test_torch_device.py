import pytest
import torch

from ingot.backends.open import find_device, framework_version, measure_flops
from ingot.errors import ConfigError

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda", 0), torch.device("mps")


@pytest.fixture
def machine(monkeypatch):
    """Pretend to stand on a machine with these devices."""

    def set_up(gpus=0, mps=False, bf16=True, name=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return set_up


@pytest.mark.parametrize(("gpus", "mps", "expected"), [(2, False, CUDA), (1, True, CUDA), (0, True, MPS), (0, False, CPU)])
def test_auto_is_the_best_device_present(machine, gpus, mps, expected):
    machine(gpus, mps)
    assert torch.device(str(find_device("auto"))) == expected


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_local_rank_has_a_gpu_of_its_own(machine, name):
    machine(gpus=4)
    assert [find_device(name, rank).index for rank in range(4)] == [0, 1, 2, 3]


def test_a_gpu_can_be_asked_for_by_number(machine):
    machine(gpus=4)
    assert torch.device(str(find_device("cuda:2"))) == torch.device("cuda", 2)


def test_cpu_is_cpu_even_where_a_gpu_is(machine):
    machine(gpus=4, mps=True)
    assert torch.device(str(find_device("cpu"))) == CPU


@pytest.mark.parametrize(("name", "local_rank", "gpus", "asked"), [("cuda", 0, 0, 0), ("cuda:3", 0, 2, 3), ("cuda", 2, 2, 2)])
def test_a_gpu_that_is_not_there_is_an_error(machine, name, local_rank, gpus, asked):
    machine(gpus=gpus)
    with pytest.raises(ConfigError, match=rf"training\.device={name} requests GPU {asked} .*, but this machine has {gpus}"):
        find_device(name, local_rank)


def test_more_ranks_than_gpus_are_an_error_and_no_quiet_sharing(machine):
    machine(gpus=2)
    with pytest.raises(ConfigError, match=r"fewer ranks"):
        find_device("auto", local_rank=2)


def test_mps_that_is_not_there_is_an_error(machine):
    machine()
    with pytest.raises(ConfigError, match=r"training\.device=mps needs an Apple GPU"):
        find_device("mps")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:-1", "Cuda", "meta", "xpu"])
def test_what_is_no_device_is_an_error(name):
    with pytest.raises(ConfigError, match=r"use auto, cpu, cuda, cuda:N, mps or mlx"):
        find_device(name)


@pytest.mark.parametrize(
    ("name", "bf16", "expected"),
    [("cuda", True, "bf16"), ("cuda", False, "fp16"), ("cpu", True, "fp32"), ("mps", True, "fp32")],
)
def test_auto_precision_is_what_the_device_computes_quickly(machine, name, bf16, expected):
    machine(gpus=1, mps=True, bf16=bf16)
    assert find_device(name).precision("auto") == expected


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_a_precision_that_is_asked_for_is_used(machine, device, bf16, name):
    machine(gpus=1, mps=True, bf16=bf16)
    assert find_device(device).precision(name) == name


def test_fp16_is_refused_on_a_cpu(machine):
    machine(gpus=1)
    with pytest.raises(ConfigError, match=r"training\.precision=fp16 needs a GPU; on a CPU use fp32"):
        find_device("cpu").precision("fp16")
    assert find_device("cuda").precision("fp16") == "fp16"


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A40", 150e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_the_rate_of_a_known_gpu_is_its_data_sheets(machine, name, rate):
    machine(gpus=1, name=name)
    assert find_device("cuda").peak_flops == rate


@pytest.mark.parametrize("name", ["NVIDIA RTX A4000", "NVIDIA RTX A1000", "NVIDIA T400 4GB", "NVIDIA GeForce GTX 1080"])
def test_a_gpu_without_a_data_sheet_has_no_rate(machine, name):
    machine(gpus=1, name=name)
    assert find_device("cuda").peak_flops is None


def test_a_cpu_has_no_rate():
    assert find_device("cpu").peak_flops is None


def test_devices_are_described(machine):
    machine(gpus=1, mps=True, name="NVIDIA H200")
    assert find_device("cuda").name == "NVIDIA H200"
    threads = torch.get_num_threads()
    assert find_device("cpu").name == f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    assert find_device("mps").name == "mps"


def test_a_device_is_written_as_the_setting_names_it(machine):
    machine(gpus=2, mps=True)
    assert [str(find_device(name)) for name in ("cuda:1", "cpu", "mps")] == ["cuda:1", "cpu", "mps"]


def test_the_rate_of_a_cpu_can_be_measured():
    assert measure_flops(find_device("cpu")) > 1e8


def test_the_version_is_torchs_own():
    assert framework_version() == torch.__version__
