"""Explains why Slurm refuses a job, and why a job waits. An explanation names the settings, and tells how to fix the
problem.

Refusals are recognized by the texts of Slurm's errors (src/common/slurm_errno.c), which are the same in many versions.
"""

from __future__ import annotations

import re

from hvdcomp.tools.launch.slurm.settings import SlurmJob

_PARTITIONS = "`sinfo --summarize` lists the partitions"
_ACCOUNTS = "`sacctmgr show associations user=$USER format=account,partition,qos` lists your accounts"
_LIMITS = "`sinfo --format='%P %l'` lists each partition's limit"
_SIZE = ("nodes", "tasks_per_node", "cpus_per_task", "gpus_per_node", "gres", "memory")

_REFUSALS: dict[str, tuple[tuple[str, ...], str]] = {
    "Invalid partition name specified": (("partition",), f"use another ({_PARTITIONS})"),
    "No partition specified or system default partition": (
        ("partition",),
        f"the cluster has no default partition, so name a partition ({_PARTITIONS})",
    ),
    "User's group not permitted to use this partition": (
        ("partition",),
        "use a partition whose AllowGroups contains one of your groups (`scontrol show partition`)",
    ),
    "Required partition not available": (
        ("partition",),
        f"this partition accepts no jobs now, so use another partition, or wait ({_PARTITIONS})",
    ),
    "Invalid account or account/partition combination specified": (
        ("account", "partition"),
        f"use an account that may use the partition ({_ACCOUNTS})",
    ),
    "Invalid qos specification": (
        ("qos", "account", "partition"),
        f"use a QOS that the account may use ({_ACCOUNTS})",
    ),
    "Requested time limit is invalid": (
        ("time", "partition"),
        f"use a shorter time limit, or another partition ({_LIMITS}). A job that saves checkpoints is requeued and "
        "continues",
    ),
    "Job violates accounting/QOS policy": (
        ("account", "qos", "time", *_SIZE),
        "ask for fewer resources, wait until other jobs of yours have ended, or use another account or QOS (`sacctmgr "
        "show associations user=$USER`, `sacctmgr show qos`)",
    ),
    "Requested node configuration is not available": (
        ("partition", "constraint", "reservation", *_SIZE),
        "too few nodes have everything that the job asks for, so ask for fewer resources, or use another partition "
        "(`sinfo --format='%P %D %c %m %G %f'` lists nodes, cores, memory, GPUs and features)",
    ),
    "Invalid generic resource (gres) specification": (
        ("gpus_per_node", "gres", "partition"),
        "ask for resources that the nodes have (`sinfo --format='%P %G'` lists the resources of the nodes)",
    ),
    "Invalid feature specification": (
        ("constraint",),
        "use features that the nodes have (`sinfo --format='%P %f'` lists them)",
    ),
    "Requested reservation is invalid": (("reservation",), "use a reservation that `scontrol show reservation` lists"),
    "Access denied to requested reservation": (
        ("reservation", "account"),
        "use a reservation that you may use (`scontrol show reservation` lists Users and Accounts)",
    ),
    "Node count specification invalid": (
        ("nodes", "partition"),
        "use a number that the partition allows (`scontrol show partition` lists MinNodes and MaxNodes)",
    ),
    "More processors requested than permitted": (
        ("partition", *_SIZE),
        "ask for fewer nodes, ranks or cores, or use another partition (`scontrol show partition`)",
    ),
    "Memory required by task is not available": (
        ("memory", "partition"),
        "ask for less memory (`sinfo --format='%P %m'` lists the megabytes of the nodes)",
    ),
}

_NEVER = "it will never start"
_REASONS: dict[str, str] = {
    r"PartitionTimeLimit|(Assoc|QOS)MaxWallDurationPerJobLimit": (
        f"{_NEVER}: the time limit (--time) is longer than the partition, account or QOS allows; {_LIMITS}"
    ),
    "PartitionNodeLimit": (
        f"{_NEVER}: the partition does not allow this number of nodes (--nodes); `scontrol show partition` lists the "
        "allowed numbers"
    ),
    r"(Assoc|QOS)Max\w+Per(Job|Node).*": (
        f"{_NEVER}: the job asks for more than the account or QOS allows one job; `sacctmgr show qos` lists the limits"
    ),
    r"AccountNotAllowed|InvalidAccount|Job's_account_not.*": (
        f"{_NEVER}: the account (--account) may not use the partition (--partition); {_ACCOUNTS}"
    ),
    r"QOSNotAllowed|InvalidQOS|Job's_QOS_not.*": (
        f"{_NEVER}: the QOS (--qos) may not be used with this account or partition; {_ACCOUNTS}"
    ),
    "PartitionConfig": (
        "the job asks for more nodes (--nodes) than the partition has, so it can start only after the partition gets "
        "more nodes; `sinfo --format='%P %D'` lists the number of nodes of each partition"
    ),
    "BadConstraints": f"{_NEVER}: no node has everything that the job asks for",
    "PartitionDown|PartitionInactive": (f"the job waits until its partition accepts jobs again; {_PARTITIONS}"),
    r"ReqNodeNotAvail.*|Nodes_required_for_job_are_DOWN.*": (
        "the job waits for nodes that are down or reserved; `sinfo --list-reasons` lists the reasons"
    ),
    r"JobHeldUser|JobHeldAdmin|launch_failed_requeued_held": (
        "it is held until somebody runs `scontrol release`; `scontrol show job` shows details"
    ),
}


def refusal(message: str, settings: SlurmJob) -> str | None:
    """Explains why Slurm refuses a job. The explanation has Slurm's message, the flags with their values, and how to
    fix the problem.

    Args:
        message: the output of sbatch, on one line.
        settings: the settings of the job.

    Returns:
        One line; None if the message is unknown.
    """
    for text, (names, way_out) in _REFUSALS.items():
        if text in message:
            return f"Slurm refuses the job: {message} ({settings.flags(names)}): {way_out}"
    return None


def explain_reason(reason: str) -> str:
    """Explains why a job is pending. `reason` is Slurm's reason. The result is "" if the job waits for its turn, or if
    the reason is unknown."""
    return next((words for pattern, words in _REASONS.items() if re.fullmatch(pattern, reason)), "")
