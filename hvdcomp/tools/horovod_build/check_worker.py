"""The program that each rank runs to check a newly built Horovod. It runs an allreduce and an all-gather, and compares
the results with the expected results.

`hvdcomp.tools.horovod_build.check` starts it with horovodrun and the argument `torch` or `tensorflow`.
"""

from __future__ import annotations

import sys


def check_torch() -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    devices = ["cpu"]
    if hvd.nccl_built() and torch.cuda.device_count() >= hvd.local_size():
        devices.append(f"cuda:{hvd.local_rank()}")
    for device in devices:
        value = torch.full((3,), float(hvd.rank() + 1), device=device)
        total = hvd.allreduce(value, op=hvd.Sum, name=f"sum.{value.device.type}")
        _expect(total.tolist(), [hvd.size() * (hvd.size() + 1) / 2] * 3, f"torch allreduce on {device}")
    parts = hvd.allgather(torch.tensor([hvd.rank()], dtype=torch.uint8), name="parts")
    _expect(parts.tolist(), list(range(hvd.size())), "torch allgather")
    _expect(hvd.size(), 2, "size")
    hvd.shutdown()


def check_tensorflow() -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    hvd.init()
    total = hvd.allreduce(tf.fill([3], float(hvd.rank() + 1)), op=hvd.Sum, name="sum")
    _expect(total.numpy().tolist(), [hvd.size() * (hvd.size() + 1) / 2] * 3, "TensorFlow allreduce")
    parts = hvd.allgather(tf.constant([hvd.rank()], dtype=tf.uint8), name="parts")
    _expect(parts.numpy().tolist(), list(range(hvd.size())), "TensorFlow allgather")
    _expect(hvd.size(), 2, "size")
    hvd.shutdown()


def _expect(value: object, expected: object, operation: str) -> None:
    if value != expected:
        raise SystemExit(f"{operation}: got {value}, expected {expected}")


if __name__ == "__main__":
    {"torch": check_torch, "tensorflow": check_tensorflow}[sys.argv[1]]()
