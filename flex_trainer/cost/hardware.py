"""Devices as numbers: memory, arithmetic, bandwidths; and the roofline that turns work into seconds.

The figures are those that vendors print, for dense matrices and one direction of a link. What a run reaches of them is
a share that is stated here too (`Attainable`). `flex-trainer profile` measures the machine at hand in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flex_trainer.cost.roofline import Rates, Roofline
from flex_trainer.errors import UserError

_QUANTIZE_TRAFFIC = 30
"""Bytes that quantizing and restoring move per byte of a bfloat16 value: 60 per element over the ten passes of
`activations/quantize.py` (abs 4, amax 2, float 6, divide 8, clamp 8, round 8, cast 5; back: float 5, scale 8, copy 6).
"""


@dataclass(frozen=True)
class Attainable:
    """The share of a printed peak that a training run reaches. Assumptions, not measurements: measure a machine with
    `flex-trainer profile` where it matters."""

    matmul: float = 0.65
    """Large matrix products: clocks fall under sustained load, and tiles at the edges do less work."""
    memory: float = 0.8
    """Elementwise kernels: refresh, row misses, and reads mixed with writes."""
    link: float = 0.75
    """Collectives over links: protocol overhead and steps that wait for one another."""
    host_link: float = 0.8
    """Copies to pinned host memory: packet headers of the bus."""


@dataclass(frozen=True)
class Hardware:
    """One device and how it is connected. Bandwidths are in bytes per second, links in one direction."""

    name: str
    title: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    """Dense peak in FLOP/s by type: bfloat16, float32, tf32, float8."""
    memory_bytes_per_second: float
    host_link_bytes_per_second: float
    node_link_bytes_per_second: float
    """Per device, to the others of its node."""
    network_bytes_per_second: float
    """Per device, to other nodes."""
    devices_per_node: int = 8
    attainable: Attainable = field(default_factory=Attainable)
    launch_seconds: float = 5e-6
    """Added per operator: what a kernel takes to start when nothing hides it."""
    is_gpu: bool = True
    offload: Roofline | None = None
    """Measured; None: from the host link."""
    quantize: Roofline | None = None
    """Measured; None: from the memory bandwidth."""
    runtime_bytes: int = 0
    """In use before the model is there, where the limit counts it: the interpreter and its libraries on a CPU."""

    def flops_per_second(self, dtype: str) -> float:
        """What matrix products of a type reach."""
        peak = self.peak_flops.get(dtype)
        if peak is None:
            raise UserError(
                f"hardware {self.name!r} has no figure for {dtype}; it has {', '.join(sorted(self.peak_flops))}"
            )
        return peak * self.attainable.matmul

    def operator_seconds(self, flops: float, moved_bytes: float, dtype: str) -> float:
        """Roofline of an operator: the slower of arithmetic and memory, and its launch. Doing nothing takes no time."""
        if flops <= 0 and moved_bytes <= 0:
            return 0.0
        return max(flops / self.flops_per_second(dtype), self.memory_seconds(moved_bytes)) + self.launch_seconds

    def memory_seconds(self, moved_bytes: float) -> float:
        """Time to read and write bytes of the device's memory."""
        return moved_bytes / (self.memory_bytes_per_second * self.attainable.memory)

    def rates(self, in_flight_bytes: int = 0) -> Rates:
        """What the mitigations cost here: fixed overhead and bandwidth, whose product is the knee of the paper's
        Figure 6. An offloaded byte crosses the host link twice, down and up."""
        one_way = self.host_link_bytes_per_second * self.attainable.host_link
        offload = self.offload or Roofline(4 * self.launch_seconds, one_way / 2)
        quantize = self.quantize or Roofline(
            10 * self.launch_seconds,
            self.memory_bytes_per_second * self.attainable.memory / _QUANTIZE_TRAFFIC,
        )
        return Rates(
            offload=offload,
            quantize=quantize,
            in_flight_bytes=in_flight_bytes,
            recompute_overhead_seconds=4 * self.launch_seconds,
        )

    def ring_seconds(self, num_bytes: float, num_ranks: int, ranks_per_node: int) -> float:
        """Time of an all-gather, or a reduce-scatter, of `num_bytes` in all over `num_ranks`.

        Every rank receives (or sends) all but its own part; where the group leaves the node, at the network's pace.
        """
        if num_ranks <= 1:
            return 0.0
        is_inside = num_ranks <= ranks_per_node
        bandwidth = self.node_link_bytes_per_second if is_inside else self.network_bytes_per_second
        return num_bytes * (num_ranks - 1) / num_ranks / (bandwidth * self.attainable.link)

    def all_to_all_seconds(self, num_bytes: float, num_ranks: int, ranks_per_node: int) -> float:
        """Time in which a rank exchanges `num_bytes`, spread evenly over `num_ranks`, itself among them.

        What stays in the node and what leaves it travel side by side: the slower one counts.
        """
        if num_ranks <= 1:
            return 0.0
        near = min(num_ranks, ranks_per_node)
        near_seconds = num_bytes * (near - 1) / num_ranks / self.node_link_bytes_per_second
        far_seconds = num_bytes * (num_ranks - near) / num_ranks / self.network_bytes_per_second
        return max(near_seconds, far_seconds) / self.attainable.link


def knee_bytes(roofline: Roofline) -> float:
    """S of the paper's Figure 6: below it the overhead dominates; above, the bandwidth B."""
    return roofline.overhead_seconds * roofline.bytes_per_second


_GB, _TB, _TERA, _GIB = 10**9, 10**12, 10**12, 2**30

# Links of a device are printed as the sum of both directions by NVIDIA and AMD (NVLink, Infinity Fabric, PCIe); half of
# it is what one direction carries. Memory is what torch reports (`total_memory`): a printed GB of it is nearly a GiB,
# less what the device keeps for itself. For the card of the paper, which cannot be asked, it is as printed, in GiB.
_TABLE = (
    Hardware(
        name="h100",
        title="NVIDIA H100 SXM 80 GB",
        # NVIDIA H100 data sheet (SXM): 80 GB, 3.35 TB/s; bfloat16 1,979, TF32 989, FP8 3,958 TFLOPS with sparsity, half
        # of that dense; FP32 67 TFLOPS; NVLink 900 GB/s, PCIe Gen5 128 GB/s, both directions together.
        memory_bytes=int(79.1 * _GIB),
        peak_flops={"bfloat16": 989.5 * _TERA, "tf32": 494.5 * _TERA, "float32": 67 * _TERA, "float8": 1979 * _TERA},
        memory_bytes_per_second=3.35 * _TB,
        host_link_bytes_per_second=64 * _GB,
        node_link_bytes_per_second=450 * _GB,
        network_bytes_per_second=50 * _GB,  # DGX H100 data sheet: eight 400 Gb/s ports for eight GPUs
    ),
    Hardware(
        name="h200",
        title="NVIDIA H200 SXM 141 GB",
        # NVIDIA H200 data sheet (SXM): 141 GB, 4.8 TB/s; arithmetic and links as H100.
        memory_bytes=int(139.7 * _GIB),
        peak_flops={"bfloat16": 989.5 * _TERA, "tf32": 494.5 * _TERA, "float32": 67 * _TERA, "float8": 1979 * _TERA},
        memory_bytes_per_second=4.8 * _TB,
        host_link_bytes_per_second=64 * _GB,
        node_link_bytes_per_second=450 * _GB,
        network_bytes_per_second=50 * _GB,  # DGX H200 data sheet: eight 400 Gb/s ports for eight GPUs
    ),
    Hardware(
        name="b200",
        title="NVIDIA B200 SXM 180 GB",
        # NVIDIA DGX B200 and HGX B200 data sheets, an eighth of the eight-GPU figures: 1,440 GB, 64 TB/s; bfloat16 36,
        # TF32 18, FP8 72 PFLOPS with sparsity, half of that dense; FP32 600 TFLOPS; NVLink 14.4 TB/s both directions.
        memory_bytes=int(178.3 * _GIB),
        peak_flops={"bfloat16": 2250 * _TERA, "tf32": 1125 * _TERA, "float32": 75 * _TERA, "float8": 4500 * _TERA},
        memory_bytes_per_second=8 * _TB,
        host_link_bytes_per_second=64 * _GB,  # PCIe Gen5
        node_link_bytes_per_second=900 * _GB,
        network_bytes_per_second=50 * _GB,  # DGX B200 data sheet: eight 400 Gb/s ports for eight GPUs
    ),
    Hardware(
        name="a100",
        title="NVIDIA A100 SXM 80 GB",
        # NVIDIA A100 data sheet (80GB SXM): 80 GB, 2,039 GB/s; bfloat16 312, TF32 156, FP32 19.5 TFLOPS, all dense;
        # NVLink 600 GB/s, PCIe Gen4 64 GB/s, both directions together. It has no 8-bit floating point.
        memory_bytes=int(79.1 * _GIB),
        peak_flops={"bfloat16": 312 * _TERA, "tf32": 156 * _TERA, "float32": 19.5 * _TERA},
        memory_bytes_per_second=2.039 * _TB,
        host_link_bytes_per_second=32 * _GB,
        node_link_bytes_per_second=300 * _GB,
        network_bytes_per_second=25 * _GB,  # DGX A100 data sheet: eight 200 Gb/s ports for eight GPUs
    ),
    Hardware(
        name="mi300x",
        title="AMD Instinct MI300X 192 GB",
        # AMD Instinct MI300X data sheet: 192 GB, 5.3 TB/s; bfloat16 1,307.4, TF32 653.7, FP32 163.4, FP8 2,614.9
        # TFLOPS, all dense; seven Infinity Fabric links of 128 GB/s and PCIe Gen5 128 GB/s, both directions together.
        memory_bytes=int(191.9 * _GIB),
        peak_flops={
            "bfloat16": 1307.4 * _TERA,
            "tf32": 653.7 * _TERA,
            "float32": 163.4 * _TERA,
            "float8": 2614.9 * _TERA,
        },
        memory_bytes_per_second=5.3 * _TB,
        host_link_bytes_per_second=64 * _GB,
        node_link_bytes_per_second=448 * _GB,
        network_bytes_per_second=50 * _GB,  # assumed: one 400 Gb/s port per device, as its eight-device servers have
    ),
    Hardware(
        name="64gb-480tflops",
        title="64 GB, 480 TFLOPS card",
        # BaGuaLu-2 paper, section VI-A: 64 GB, 480 TFLOPS in bfloat16; 400 GB/s inside a node of eight, four ports of
        # 400 Gb/s out of it; Figure 6: 96 MB to the host in 2.0 ms, which is 48 GB/s. Not in the paper, assumed here:
        # memory bandwidth (that of AMD's MI210 data sheet, another card with 64 GB), TF32 and float32 (a half and an
        # eighth of bfloat16).
        memory_bytes=64 * _GIB,
        peak_flops={"bfloat16": 480 * _TERA, "tf32": 240 * _TERA, "float32": 60 * _TERA},
        memory_bytes_per_second=1.6 * _TB,
        host_link_bytes_per_second=48 * _GB / 0.8,  # measured there, so before the share that is attainable
        node_link_bytes_per_second=400 * _GB,
        network_bytes_per_second=25 * _GB,
    ),
)

HARDWARE: Mapping[str, Hardware] = {hardware.name: hardware for hardware in _TABLE}
"""The table, by name."""


def of_device_name(device_name: str) -> Hardware | None:
    """The entry for what `torch.cuda.get_device_name` says, such as "NVIDIA H100 80GB HBM3"; None: not in the table."""
    lowered = device_name.lower()
    return next((hardware for name, hardware in HARDWARE.items() if name in lowered), None)
