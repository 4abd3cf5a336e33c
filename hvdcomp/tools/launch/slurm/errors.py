"""What Slurm refuses, and what keeps a job waiting, in words: which settings it is about, and what to do.

Refusals are known by Slurm's own texts for its errors (src/common/slurm_errno.c of its source), which have been the
same for many versions.
"""

from __future__ import annotations

import re

from hvdcomp.tools.launch.slurm.settings import SlurmJob

_PARTITIONS = "`sinfo --summarize` lists the partitions"
_ACCOUNTS = "`sacctmgr show associations user=$USER format=account,partition,qos` lists yours"
_LIMITS = "`sinfo --format='%P %l'` lists the longest of each partition"
_SIZE = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "gres", "memory")

_REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "Invalid partition name specified": (("partition",), f"take another ({_PARTITIONS})"),
    "No partition specified or system default partition": (
        ("partition",),
        f"the cluster has no default, so name one ({_PARTITIONS})",
    ),
    "User's group not permitted to use this partition": (
        ("partition",),
        "take one whose AllowGroups has a group of yours (`scontrol show partition`)",
    ),
    "Required partition not available": (
        ("partition",),
        f"it takes no jobs now, so take another, or wait ({_PARTITIONS})",
    ),
    "Invalid account or account/partition combination specified": (
        ("account", "partition"),
        f"take an account that may use the partition ({_ACCOUNTS})",
    ),
    "Invalid qos specification": (
        ("qos", "account", "partition"),
        f"take a QOS that the account may use ({_ACCOUNTS})",
    ),
    "Requested time limit is invalid": (
        ("time", "partition"),
        f"take less time, or another partition ({_LIMITS}); a job that saves is queued again and goes on",
    ),
    "Job violates accounting/QOS policy": (
        ("account", "qos", "time", *_SIZE),
        "ask for less, wait until other jobs of yours have ended, or take another account or QOS "
        "(`sacctmgr show associations user=$USER`, `sacctmgr show qos`)",
    ),
    "Requested node configuration is not available": (
        ("partition", "constraint", "reservation", *_SIZE),
        "not so many nodes have all of that, so ask for less, or in another partition "
        "(`sinfo --format='%P %D %c %m %G %f'` lists nodes, cores, memory, GPUs and features)",
    ),
    "Invalid generic resource (gres) specification": (
        ("gpus_per_node", "gres", "partition"),
        "ask for what the nodes have (`sinfo --format='%P %G'` lists it)",
    ),
    "Invalid feature specification": (
        ("constraint",),
        "take features that nodes have (`sinfo --format='%P %f'` lists them)",
    ),
    "Requested reservation is invalid": (("reservation",), "take one that `scontrol show reservation` lists"),
    "Access denied to requested reservation": (
        ("reservation", "account"),
        "take one that is yours (`scontrol show reservation` lists Users and Accounts)",
    ),
    "Node count specification invalid": (
        ("nodes", "partition"),
        "take a number that the partition allows (`scontrol show partition` lists MinNodes and MaxNodes)",
    ),
    "More processors requested than permitted": (
        ("partition", *_SIZE),
        "ask for fewer nodes, ranks or cores, or take another partition (`scontrol show partition`)",
    ),
    "Memory required by task is not available": (
        ("memory", "partition"),
        "ask for less (`sinfo --format='%P %m'` lists the megabytes of nodes)",
    ),
}

_NEVER = "it never starts so"
_REASONS: dict[str, str] = {
    r"PartitionTimeLimit|(Assoc|QOS)MaxWallDurationPerJobLimit": (
        f"{_NEVER}: the time limit (--time) is longer than the partition, account or QOS allows; {_LIMITS}"
    ),
    "PartitionNodeLimit": (
        f"{_NEVER}: the partition allows more or fewer nodes (--nodes); `scontrol show partition` lists how many"
    ),
    r"(Assoc|QOS)Max\w+Per(Job|Node).*": (
        f"{_NEVER}: it asks for more than the account or QOS allows one job; `sacctmgr show qos` lists that"
    ),
    r"AccountNotAllowed|InvalidAccount|Job's_account_not.*": (
        f"{_NEVER}: the account (--account) may not use the partition (--partition); {_ACCOUNTS}"
    ),
    r"QOSNotAllowed|InvalidQOS|Job's_QOS_not.*": (
        f"{_NEVER}: the QOS (--qos) may not be used there; {_ACCOUNTS}"
    ),
    "PartitionConfig": (
        "it starts only if the partition gets as many nodes (--nodes); `sinfo --format='%P %D'` lists how many it has"
    ),
    "BadConstraints": f"{_NEVER}: no nodes have all that it asks for",
    "PartitionDown|PartitionInactive": f"its partition takes no jobs now, and it waits for that; {_PARTITIONS}",
    r"ReqNodeNotAvail.*|Nodes_required_for_job_are_DOWN.*": (
        "nodes that it needs are down or reserved, and it waits for them; `sinfo --list-reasons` says why"
    ),
    r"JobHeldUser|JobHeldAdmin|launch_failed_requeued_held": (
        "it is held, and starts once `scontrol release` lets it; `scontrol show job` says more"
    ),
}


def refusal(said: str, settings: SlurmJob) -> str | None:
    """Why Slurm does not take a job: what it said, the flags that this is about with their values, and the way out.

    Args:
        said: what sbatch wrote, on one line.

    Returns:
        one line; None if nothing is known about what Slurm said.
    """
    for text, (names, way_out) in _REFUSALS.items():
        if text in said:
            return f"Slurm refuses the job: {said} ({settings.flags(names)}): {way_out}"
    return None


def what_keeps(reason: str) -> str:
    """What keeps a pending job that Slurm gives this reason for; "" if it waits for its turn, or nothing is known."""
    return next((words for pattern, words in _REASONS.items() if re.fullmatch(pattern, reason)), "")
