"""Settings from the environment: this module alone reads ``os.environ``.

`RuntimeConfig` holds the knobs that have no place in a call's arguments; `Launch` is what a launcher
(torchrun, Slurm's srun, Open MPI's mpirun) says about this process.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_rt.errors import UsageError


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:  # neither nan nor inf
        raise UsageError(
            f"the environment variable {name} is not usable",
            expected="a number of seconds above 0",
            got=repr(text),
            fix="unset it or give it a number",
        )
    return value


@dataclass(frozen=True)
class RuntimeConfig:
    """Settings that come from the environment and from nowhere else.

    Attributes:
        rendezvous_timeout_s: How long a rank looks for the rendezvous at MASTER_ADDR:MASTER_PORT
            (``BAGUA_RT_RENDEZVOUS_TIMEOUT_S``).
        trace_dir: Where every attachment writes a Chrome trace per rank when it closes; None is off
            (``BAGUA_RT_TRACE_DIR``).
        flight_dir: Where an attachment that fails writes its flight record (``BAGUA_RT_FLIGHT_DIR``; a folder
            ``bagua_rt`` among the system's temporary files otherwise).
        nccl_path: The libnccl to load, instead of searching for one (``BAGUA_RT_NCCL``).
        cache_dir: Where compiled kernels are kept (``BAGUA_RT_CACHE_DIR``).
    """

    rendezvous_timeout_s: float = 8.0
    trace_dir: Path | None = None
    flight_dir: Path = Path(tempfile.gettempdir()) / "bagua_rt"
    nccl_path: Path | None = None
    cache_dir: Path = Path.home() / ".cache" / "bagua_rt"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RuntimeConfig:
        """Read the settings.

        Args:
            environ: The variables; None takes the process's own.

        Raises:
            UsageError: a variable holds what it can't.
        """
        environ = os.environ if environ is None else environ
        trace_dir, flight, nccl, cache = (
            environ.get(f"BAGUA_RT_{name}") for name in ("TRACE_DIR", "FLIGHT_DIR", "NCCL", "CACHE_DIR")
        )
        return cls(
            rendezvous_timeout_s=_number(environ, "BAGUA_RT_RENDEZVOUS_TIMEOUT_S", cls.rendezvous_timeout_s),
            trace_dir=Path(trace_dir) if trace_dir else None,
            flight_dir=Path(flight) if flight else cls.flight_dir,
            nccl_path=Path(nccl) if nccl else None,
            cache_dir=Path(cache) if cache else cls.cache_dir,
        )


@dataclass(frozen=True)
class Launch:
    """What a launcher says about this process.

    Attributes:
        launcher: "torchrun", "slurm", "openmpi" or "none".
        rank: This process's rank.
        world_size: Number of processes in the job.
        local_rank: Rank on this node; None where the launcher does not say.
        local_world_size: Number of the job's processes on this node; None where the launcher does not say.
        master_addr: Host of the rendezvous; None where there is none to be found.
        master_port: Port of the rendezvous; None likewise.
        store_is_served: The launcher itself serves the rendezvous store (torchrun's agent).
        job: A text that is the same on all ranks of this job and in no other job, as far as the
            launcher tells; "" where it doesn't.
    """

    launcher: str = "none"
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    store_is_served: bool = False
    job: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Recognise the launcher by its variables: torchrun first, then Slurm, then Open MPI.

        Args:
            environ: The variables; None takes the process's own.

        Raises:
            UsageError: a variable is not the number that it should be, or only half of a pair is there.
        """
        environ = os.environ if environ is None else environ
        if "RANK" in environ or "WORLD_SIZE" in environ:
            return _torchrun(environ)
        if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
            return _slurm(environ)
        if "OMPI_COMM_WORLD_RANK" in environ:
            return _openmpi(environ)
        # No launcher, but a caller that passes rank and world_size may still mean this address.
        return cls(
            master_addr=environ.get("MASTER_ADDR"), master_port=_optional_integer(environ, "MASTER_PORT")
        )


def _integer(
    environ: Mapping[str, str], name: str, fix: str = "start with torchrun, srun or mpirun", *, least: int = 0
) -> int:
    text = environ.get(name, "")
    if not re.fullmatch(r"\d+", text.strip()) or int(text) < least:
        raise UsageError(
            f"the environment variable {name} is not usable",
            expected="a whole number" + f", {least} or more" * (least > 0),
            got=repr(text) if name in environ else "nothing: it is not set",
            fix=fix,
        )
    return int(text)


def _optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return _integer(environ, name) if name in environ else None


def _torchrun(environ: Mapping[str, str]) -> Launch:
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    return Launch(
        launcher="torchrun",
        rank=_integer(environ, "RANK", "set RANK and WORLD_SIZE both, or neither"),
        world_size=_integer(environ, "WORLD_SIZE", "set RANK and WORLD_SIZE both, or neither", least=1),
        local_rank=_optional_integer(environ, "LOCAL_RANK"),
        local_world_size=_optional_integer(environ, "LOCAL_WORLD_SIZE"),
        master_addr=environ.get("MASTER_ADDR"),
        master_port=_optional_integer(environ, "MASTER_PORT"),
        store_is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        job=f"torchrun/{run_id}/{restart}" if run_id else "",
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    job_id, step_id = environ.get("SLURM_JOB_ID", "0"), environ["SLURM_STEP_ID"]
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "")
    digits = int(re.sub(r"\D", "", job_id + step_id) or 0)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    local_sizes = tasks_per_node(tasks)
    node = _optional_integer(environ, "SLURM_NODEID")
    return Launch(
        launcher="slurm",
        rank=_integer(environ, "SLURM_PROCID"),
        world_size=_integer(environ, size, least=1),
        local_rank=_optional_integer(environ, "SLURM_LOCALID"),
        local_world_size=local_sizes[node] if node is not None and node < len(local_sizes) else None,
        master_addr=environ.get("MASTER_ADDR") or first_host(nodes) or None,
        master_port=_optional_integer(environ, "MASTER_PORT") or 20_000 + digits % 20_000,
        job=f"slurm/{job_id}/{step_id}",
    )


def _openmpi(environ: Mapping[str, str]) -> Launch:
    world_size = _integer(environ, "OMPI_COMM_WORLD_SIZE", least=1)
    local_size = _optional_integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid", "")
    one_node = local_size == world_size
    digits = int(re.sub(r"\D", "", job) or 0)
    return Launch(
        launcher="openmpi",
        rank=_integer(environ, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_optional_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_world_size=local_size,
        master_addr=environ.get("MASTER_ADDR") or ("127.0.0.1" if one_node else None),
        master_port=_optional_integer(environ, "MASTER_PORT") or 20_000 + digits % 20_000,
        job=f"openmpi/{job}" if job else "",
    )


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[07-09,12],login1`` gives ``gpu07``."""
    entry = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", entry.group()) if entry else ""


def tasks_per_node(text: str) -> list[int]:
    """Slurm's count of tasks on each node: ``2(x3),1`` gives ``[2, 2, 2, 1]``."""
    sizes: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        sizes += [int(count)] * int(repeat or 1)
    return sizes
