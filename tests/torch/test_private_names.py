"""The names of PyTorch that hvdcomp uses without a promise that they stay: a new release that lacks one is seen here
first, and by which name."""

from __future__ import annotations

import inspect
import operator
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
fsdp = pytest.importorskip("torch.distributed.fsdp")

ROOT = Path(__file__).parents[2]
NAMES = [
    "_C._current_autograd_node",
    "_C._current_graph_task_id",
    "_C._storage_Use_Count",
    "_C.Future",
    "_dynamo.lookup_backend",
    "_foreach_add",
    "_foreach_add_",
    "_foreach_addcdiv_",
    "_foreach_div_",
    "_foreach_lerp_",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_sqrt",
    "autograd.Variable._execution_engine.queue_callback",
    "_ops.OpOverload",
    "cuda._sleep",
    "distributed.ProcessGroup._get_backend",
    "distributed.distributed_c10d._resolve_process_group",
    "distributed.distributed_c10d._world.group_count",
    "distributed.distributed_c10d._world.pg_names",
    "nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "ops._c10d_functional",
]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there_and_used(name: str) -> None:
    operator.attrgetter(name)(torch)
    last = name.rpartition(".")[2]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "hvdcomp").rglob("*.py"))
    assert re.search(rf"\b{last}\b", sources), "take it from the list"


def test_objects_have_the_attributes() -> None:
    """Without them `getattr(object, name, default)` would pass in silence."""
    in_sources = {
        torch.nn.parallel.DistributedDataParallel: "self._use_python_reducer",
        pytest.importorskip("torch.distributed.algorithms.join").Joinable: "self._join_config",
        pytest.importorskip("torch.distributed.optim.apply_optimizer_in_backward"): "._in_backward_optimizers",
    }
    for owner, attribute in in_sources.items():
        assert attribute in inspect.getsource(owner)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    assert hasattr(optimizer, "_optimizer_step_pre_hooks")


@pytest.mark.skipif(not hasattr(fsdp.FSDPModule, "set_custom_reduce_scatter"), reason="this PyTorch has no such hooks")
def test_fsdp_calls_its_hooks_as_before() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    from hvdcomp.torch.fsdp.shards import _ReduceScatter
    from hvdcomp.torch.fsdp.weight_changes import WeightChanges

    for theirs, ours in ((_fsdp_api.ReduceScatter, _ReduceScatter), (_fsdp_api.AllGather, WeightChanges)):
        for method in ("allocate", "__call__"):
            expected, given = (inspect.signature(getattr(one, method)).parameters for one in (theirs, ours))
            assert list(given) == list(expected), (ours, method)
    hook = inspect.signature(fsdp.FSDPModule.set_all_reduce_hook).parameters
    assert list(hook)[:2] == ["self", "hook"]
    assert hasattr(fsdp.FSDPModule, "set_custom_all_gather")


def test_fsdp_allreduces_where_its_records_say_so() -> None:
    """The class of `mesh_info`, which `fsdp/replicas.py` changes, says whether FSDP averages between replicas."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group

    source = inspect.getsource(_fsdp_param_group.FSDPParamGroup)
    assert "self._all_reduce_process_group\n                if isinstance(self.mesh_info, DDPMeshInfo)" in source
    for attribute in ("fsdp_params", "post_forward_mesh_info", "_all_reduce_hook", "all_reduce_grads"):
        assert re.search(rf"self\.{attribute}\b", source), attribute
    assert "self.sharded_param = " in inspect.getsource(_fsdp_param_group.FSDPParam)
    hybrid, sharded, replicated = (getattr(_fsdp_common, f"{kind}MeshInfo") for kind in ("HSDP", "FSDP", "DDP"))
    assert issubclass(hybrid, sharded)
    assert issubclass(hybrid, replicated)
    assert not issubclass(sharded, replicated)
    assert issubclass(replicated, _fsdp_common.DataParallelMeshInfo)
