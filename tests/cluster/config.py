"""The text of every configuration file, as functions of the settings; the comments say what each odd option is for."""

from __future__ import annotations

from tests.cluster.layout import Layout
from tests.cluster.settings import GPU_NODES, NODES, Settings

# Slurm only looks whether they are character devices, and hands out indexes; it refuses plain files and bare counts.
FAKE_GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
CREDENTIAL_SECONDS = 6  # a requeued job waits until its old credential has expired: with Slurm's own 120 s, two minutes
CGROUP_LINE = "ProctrackType=proctrack/cgroup"
DATABASE = "slurm_accounting"


def slurm_conf(layout: Layout, settings: Settings, *, host: str, user: str) -> str:
    """slurm.conf of a cluster whose daemons all run on `host` as `user`, with time-outs of seconds."""
    options = {
        "ClusterName": "evo",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": settings.ctld_port,
        "SlurmUser": user,
        "SlurmdUser": user,
        "CommunicationParameters": "NoCtldInAddrAny",  # NoInAddrAny would hang srun inside batch jobs
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket},cred_expire={CREDENTIAL_SECONDS}",
        "CredType": "cred/munge",
        "StateSaveLocation": layout.state,
        "SlurmdSpoolDir": layout.spool("%n"),
        "SlurmctldPidFile": layout.pid_file("slurmctld"),
        "SlurmdPidFile": layout.pid_file("slurmd.%n"),
        "SlurmctldLogFile": layout.log("slurmctld"),
        "SlurmdLogFile": layout.log("slurmd.%n"),
        "SlurmctldDebug": "info",
        "SlurmdDebug": "info",
        "LogTimeFormat": "iso8601_ms",
        "ProctrackType": "proctrack/cgroup" if settings.cgroup else "proctrack/linuxproc",
        "TaskPlugin": "task/cgroup" if settings.cgroup else "task/none",
        "SwitchType": "switch/none",
        "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": 5,
        "ReturnToService": 2,  # a node that was killed is used again as soon as its slurmd is back
        "SlurmctldTimeout": 10,
        "SlurmdTimeout": 5,
        "InactiveLimit": 0,
        "KillWait": 3,
        "MinJobAge": 300,
        "MessageTimeout": 10,
        "TCPTimeout": 2,
        "OverTimeLimit": 0,
        "JobRequeue": 1,
        "PropagateResourceLimits": "NONE",
        "MaxJobCount": 20000,
        "MaxArraySize": 5001,
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_min_interval=100000,bf_interval=2,bf_max_job_test=200",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": 100,
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "SlurmctldParameters": "preempt_send_user_signal",  # a preempted job gets the signal that it asked for with --signal
        "SlurmdParameters": "config_overrides",  # the nodes claim more CPUs and memory than the machine has
        "GresTypes": "gpu",
        **accounting_options(layout, settings),
    }
    lines = [f"{name}={value}" for name, value in options.items()]
    for node in NODES:
        gres = f" Gres=gpu:fake:{len(FAKE_GPUS)}" if node in GPU_NODES else ""
        lines.append(f"NodeName={node} NodeHostname={host} NodeAddr={settings.address(node)} Port={settings.node_port(node)} "
                     f"CPUs=8 RealMemory=4000{gres} State=UNKNOWN")
    return "\n".join([*lines, *PARTITIONS]) + "\n"


# Tiers decide who preempts whom: every other partition takes nodes from scavenge, and nobody else can be preempted.
PARTITIONS = (
    "PartitionName=DEFAULT State=UP MaxTime=1-0 DefaultTime=10:00 PreemptMode=OFF",
    "PartitionName=debug Nodes=n[1-4] Default=YES PriorityTier=20 MaxTime=30:00",
    "PartitionName=train Nodes=n[1-2] PriorityTier=10",
    "PartitionName=eval Nodes=n[3-4] PriorityTier=10",
    "PartitionName=scavenge Nodes=n[1-4] PriorityTier=1 PreemptMode=REQUEUE GraceTime=5",
    "PartitionName=urgent Nodes=n[1-4] PriorityTier=100",
)


def accounting_options(layout: Layout, settings: Settings) -> dict[str, object]:
    """The accounting part of slurm.conf; with AccountingStoragePass naming the munge socket, or encoding fails."""
    if not settings.accounting:
        return {"AccountingStorageType": "accounting_storage/none"}
    return {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "AccountingStorageHost": "127.0.0.1",
        "AccountingStoragePort": settings.dbd_port,
        "AccountingStoragePass": layout.munge_socket,
        "AccountingStorageTRES": "gres/gpu",
        "AccountingStoreFlags": "job_comment",
    }


def gres_conf() -> str:
    """The fake GPUs of n1 and n2."""
    nodes = ",".join(GPU_NODES)
    return "\n".join(["AutoDetect=off", *(f"NodeName={nodes} Name=gpu Type=fake File={device}" for device in FAKE_GPUS)]) + "\n"


def cgroup_conf() -> str:
    """Used with --cgroup: memory limits are enforced, and no process outlives its job."""
    return ("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
            "ConstrainRAMSpace=yes\nConstrainCores=no\nConstrainDevices=no\n")


def slurmdbd_conf(layout: Layout, settings: Settings, *, host: str, user: str, password: str) -> str:
    """slurmdbd.conf; slurmdbd refuses one that others may read."""
    options = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "DbdHost": host,
        "DbdAddr": "127.0.0.1",
        "DbdPort": settings.dbd_port,
        "SlurmUser": user,
        "PidFile": layout.pid_file("slurmdbd"),
        "LogFile": layout.log("slurmdbd"),
        "DebugLevel": "info",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StoragePort": settings.database_port,
        "StorageUser": "slurm",
        "StoragePass": password,
        "StorageLoc": DATABASE,
        "CommitDelay": 0,
    }
    return "".join(f"{name}={value}\n" for name, value in options.items())


def database_script(password: str) -> str:
    """What mariadbd runs at every start, before it listens; `password` is letters and digits."""
    return (f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
            f"CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';\n"
            f"GRANT ALL ON {DATABASE}.* TO 'slurm'@'127.0.0.1';\n")
