"""Published figures of GPUs: what `llama-ray estimate --gpu` computes with. Each is a peak; `Gpu` says what is reached of it.

Peaks are of dense products without sparsity, with sums in float32. Memory is what nvidia-smi reports.
"""

from dataclasses import dataclass
from typing import Final

from llama_core.errors import ConfigError

_MIB: Final = 2**20
# Of the datasheet's bandwidth, what a kernel that only reads gets. gpt-fast saw 1,700 of an A100's 2,039 GB/s; copies on Hopper
# reach nine tenths.
BANDWIDTH_SHARE: Final = 0.9
# Of the datasheet's rate, what large bfloat16 products get where nobody published a measurement for the device.
PRODUCT_SHARE: Final = 0.8
# Of a link's datasheet bandwidth in one direction, what a large all-reduce gets.
LINK_SHARE: Final = 0.75
# Between two kernels of a CUDA graph. Hazy Research measured it on an H100 ("Look Ma, No Bubbles", 2025).
LAUNCH_S: Final = 1.3e-6
MAMF: Final = "bfloat16 products measured by ml-engineering, compute/accelerator (MAMF)"


@dataclass(frozen=True, slots=True)
class Link:
    """Between the GPUs of a node. bandwidth: bytes a second in one direction. hop_s: of one step of NCCL's ring with its LL
    protocol (src/graph/tuning.cc)."""

    name: str
    bandwidth: float
    hop_s: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """bandwidth: bytes a second. products: operations a second by the kind of the factors. product_share: of these, what large
    products reach. source: of the figures."""

    name: str
    title: str
    memory_bytes: int
    bandwidth: float
    products: dict[str, float]
    multiprocessors: int
    link: Link
    source: str
    product_share: float = PRODUCT_SHARE

    @property
    def read_rate(self) -> float:
        """Bytes a second that a kernel reads."""
        return self.bandwidth * BANDWIDTH_SHARE

    def product_rate(self, kind: str) -> float:
        """Operations a second of large products: "bfloat16", "float16", "float32" or "fp8" (bfloat16's on devices without)."""
        return (
            self.products.get("bfloat16" if kind == "float16" else kind, self.products["bfloat16"]) * self.product_share
        )


_PCIE_4 = Link("PCIe 4.0 x16", 32e9, 1.0e-6)
_PCIE_5 = Link("PCIe 5.0 x16", 64e9, 1.0e-6)
_NVLINK_3 = Link("NVLink 3", 300e9, 0.6e-6)
_NVLINK_4 = Link("NVLink 4", 450e9, 0.6e-6)
_NVLINK_5 = Link("NVLink 5", 900e9, 0.6e-6)


def _rates(bfloat16: float, float32: float, fp8: float | None = None) -> dict[str, float]:
    """Of TFLOP/s."""
    rates = {"bfloat16": bfloat16 * 1e12, "float32": float32 * 1e12}
    return rates if fp8 is None else rates | {"fp8": fp8 * 1e12}


_ALL: Final = (
    Gpu(
        "rtx3090",
        "GeForce RTX 3090",
        24_576 * _MIB,
        936e9,
        _rates(71, 35.6),
        82,
        _PCIE_4,
        "NVIDIA Ampere GA102 architecture, white paper",
    ),
    Gpu("a10", "A10", 23_028 * _MIB, 600e9, _rates(125, 31.2), 72, _PCIE_4, "NVIDIA A10 datasheet"),
    Gpu(
        "a100-40",
        "A100 SXM 40 GB",
        40_960 * _MIB,
        1555e9,
        _rates(312, 19.5),
        108,
        _NVLINK_3,
        f"NVIDIA A100 datasheet; {MAMF}",
        0.869,
    ),
    Gpu(
        "a100-80",
        "A100 SXM 80 GB",
        81_920 * _MIB,
        2039e9,
        _rates(312, 19.5),
        108,
        _NVLINK_3,
        f"NVIDIA A100 datasheet; {MAMF}",
        0.869,
    ),
    Gpu("l4", "L4", 23_034 * _MIB, 300e9, _rates(121, 30.3, 242), 58, _PCIE_4, "NVIDIA L4 datasheet"),
    Gpu("l40s", "L40S", 46_068 * _MIB, 864e9, _rates(362, 91.6, 733), 142, _PCIE_4, "NVIDIA L40S datasheet"),
    Gpu(
        "rtx4090",
        "GeForce RTX 4090",
        24_564 * _MIB,
        1008e9,
        _rates(165.2, 82.6, 330.3),
        128,
        _PCIE_4,
        "NVIDIA Ada GPU architecture, white paper",
    ),
    Gpu(
        "h100-pcie",
        "H100 PCIe",
        81_559 * _MIB,
        2000e9,
        _rates(756, 51, 1513),
        114,
        _PCIE_5,
        "NVIDIA H100 datasheet",
    ),
    Gpu(
        "h100-sxm",
        "H100 SXM",
        81_559 * _MIB,
        3350e9,
        _rates(989, 67, 1979),
        132,
        _NVLINK_4,
        f"NVIDIA H100 datasheet; {MAMF}",
        0.803,
    ),
    Gpu("h200", "H200 SXM", 143_771 * _MIB, 4800e9, _rates(989, 67, 1979), 132, _NVLINK_4, "NVIDIA H200 datasheet"),
    Gpu(
        "b200", "B200 SXM", 183_359 * _MIB, 8000e9, _rates(2250, 75, 4500), 148, _NVLINK_5, "NVIDIA HGX B200 datasheet"
    ),
    Gpu(
        "rtx5090",
        "GeForce RTX 5090",
        32_607 * _MIB,
        1792e9,
        _rates(209.5, 104.8, 419),
        170,
        _PCIE_5,
        "NVIDIA RTX Blackwell GPU architecture, white paper",
    ),
)
GPUS: Final = {gpu.name: gpu for gpu in _ALL}
_SHORT: Final = {"a100": "a100-80", "h100": "h100-sxm", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090"}


def find_gpu(name: str) -> Gpu:
    """By its name here, or a shorter one such as "h100". Raises ConfigError that lists the names."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    found = GPUS.get(_SHORT.get(key, key))
    if found is None:
        raise ConfigError(f"gpu must be one of {', '.join(GPUS)}", param="gpu")
    return found
