"""The processes of a run: one, or as many as `torchrun` started.

All ranks run the same program on the same data; rank 0 leads: what must happen once (rollouts, files, the console)
happens there, through `Processes.lead`. With one process everything here is a plain call and torch.distributed is not
touched.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from stepgym.errors import StepgymError, UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Rollouts of one iteration may take hours, and the other ranks wait for all of them in one call.
_PATIENCE = timedelta(days=30)
_LAST_WORDS = timedelta(seconds=60)
_LOST = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
"""What the libraries say when a process is gone."""
_LEAD_ENDED = "stepgym/lead_ended"


class LostProcessError(StepgymError):
    """Another process of the run ended while this one was waiting for it. Exit code 3."""

    exit_code = 3


class Processes:
    """The ranks of a run. Made by `start`.

    Attributes:
        rank: This process's number, from 0.
        size: Number of processes.
        local_rank: This process's number on its machine, from 0.
        local_size: Number of processes on this machine.
        device: Where this process computes: its GPU, or the CPU.
    """

    def __init__(self, rank: int, size: int, local_rank: int, local_size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.device = device
        self._control: Any = None
        self._owns_group = False
        self._leading = False

    @classmethod
    def start(cls, device: str = "auto", environment: Mapping[str, str] | None = None) -> Processes:
        """Join the processes that `torchrun` started; alone, where it did not start this one.

        Tensors on the CPU are exchanged by gloo, those on GPUs by NCCL. A process group that is there already is used
        and left as it is.

        Args:
            device: `auto`: this process's GPU (by LOCAL_RANK) where there is one, else the CPU; else a torch device.
                `cuda` without a number is this process's GPU.
            environment: Instead of `os.environ`: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
                MASTER_PORT.

        Raises:
            UserError: The environment says that there are other processes, but not how to reach them; the device is
                none, or more processes than GPUs are on this machine.
        """
        environment = os.environ if environment is None else environment
        size, rank = _number(environment, "WORLD_SIZE", 1), _number(environment, "RANK", 0)
        local_rank = _number(environment, "LOCAL_RANK", rank)
        if not 0 <= rank < size:
            raise UserError(
                f"RANK is {rank} and WORLD_SIZE is {size}: a rank is from 0 to WORLD_SIZE - 1; use torchrun"
            )
        local_size = _number(environment, "LOCAL_WORLD_SIZE", size)
        processes = cls(rank, size, local_rank, local_size, _device(device, local_rank, size))
        if processes.device.type == "cuda":
            torch.cuda.set_device(processes.device)
        if size == 1:
            return processes
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]:
            raise UserError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} is not set; start with torchrun")
        if not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if processes.device.type == "cuda" else "gloo",
                rank=rank,
                world_size=size,
                device_id=processes.device if processes.device.type == "cuda" else None,
            )
            processes._owns_group = True
        processes._control = dist.new_group(backend="gloo", timeout=_PATIENCE)
        if processes.is_lead:
            atexit.register(_say_ended)
        logger.info("rank %d of %d on %s", rank, size, processes.device)
        return processes

    @staticmethod
    def expected() -> int:
        """How many processes `start` will join, as far as the environment says; 1 where it says nothing."""
        return _number(os.environ, "WORLD_SIZE", 1)

    @property
    def group(self) -> Any:
        """The group for plain objects, whose messages may be waited for as long as it takes; None with one process."""
        return self._control

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def lead(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only, and give its result on every rank.

        All ranks must call it. The others wait, however long it takes. The result must be one that can be pickled (it
        goes between processes of one run, nowhere else). Within `function` a further `lead` is a plain call.

        Raises:
            Exception: What the function raised, on every rank: a `StepgymError` or an interrupt of the same type;
                another error that cannot be pickled becomes a RuntimeError with its type and message. On the other
                ranks it has the attribute `reported`: rank 0 says it, and nobody else need.
        """
        if self.size == 1 or self._leading:
            return function()
        if not self.is_lead:
            told: T = self._follow()
            return told
        self._leading = True
        try:
            result = function()
        except BaseException as error:
            try:
                self._tell((False, _portable(error)))
            except RuntimeError as lost:  # another rank is gone already: that is not what has to be told here
                logger.debug("the other processes could not be told of an error: %s", lost)
            raise
        finally:
            self._leading = False
        self._tell((True, result))
        return result

    def together(self, function: Callable[[], T]) -> T:
        """Call a function on every rank; where it raises on one, raise that rank's error on all.

        Not for functions in which ranks exchange something after the place where one may fail: the others would wait.
        """
        if self.size == 1:
            return function()
        result: Any = None
        own: BaseException | None = None
        try:
            result = function()
        except BaseException as raised:
            own = raised
        errors = self.gather(None if own is None else _portable(own))
        if errors[0] is not None and not self.is_lead:
            raise _reported(errors[0])  # also where it fails here as well: one report is enough
        if own is not None:
            raise own
        for error in errors:
            if error is not None:
                raise error
        told: T = result
        return told

    def share(self, value: T) -> T:
        """The value that rank 0 gives, on every rank; what the others give is ignored."""
        return self.lead(lambda: value)

    def gather(self, value: T) -> list[T]:
        """The values that all ranks give, in the order of ranks, on every rank."""
        if self.size == 1:
            return [value]
        self._together()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._control)
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks, on every rank and each rank's device. The argument is not changed."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The elementwise greatest over all ranks, on every rank and each rank's device."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            self._together()
            dist.barrier(group=self._control)

    def close(self) -> None:
        """Leave the other processes. Safe to call twice."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._control, self._owns_group = None, False

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close. After an error nothing is closed: other ranks may be within a call that would wait for them.

        An error that comes of another process's end becomes a `LostProcessError`.
        """
        if kind is None:
            self.close()
            return
        if isinstance(error, KeyboardInterrupt) and not self.is_lead:
            _reported(error)  # torchrun interrupts all ranks alike
        if getattr(error, "reported", False):
            # torchrun ends all processes as soon as one has failed. Rank 0 needs time to clean up and to say why.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends; torchrun interrupts it repeatedly
            self._wait_for_lead()
        elif isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST):
            raise LostProcessError("another process of this run ended; what it said last tells why") from error

    # ---- within -------------------------------------------------------------------------------------------------

    def _follow(self) -> Any:
        box: list[Any] = [None]
        with _interrupts_later():
            dist.broadcast_object_list(box, src=0, group=self._control)
            done, value = box[0]
        if done:
            return value
        raise _reported(value)

    def _tell(self, message: tuple[bool, Any]) -> None:
        with _interrupts_later():
            dist.broadcast_object_list([message], src=0, group=self._control)

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.size == 1:
            return tensor
        self._together()
        total = tensor.detach().clone()
        dist.all_reduce(total, operation)
        return total

    def _together(self) -> None:
        if self._leading:
            raise RuntimeError("within Processes.lead only rank 0 is at work: nothing can be exchanged there")

    def _wait_for_lead(self) -> None:
        try:
            dist.distributed_c10d._get_default_store().wait([_LEAD_ENDED], _LAST_WORDS)
        except (RuntimeError, ValueError) as error:  # the store went with rank 0, or rank 0 took too long
            logger.debug("rank 0 did not say that it ended: %s", error)


def _say_ended() -> None:
    if dist.is_initialized():
        try:
            dist.distributed_c10d._get_default_store().set(_LEAD_ENDED, "1")
        except RuntimeError as error:
            logger.debug("the other processes could not be told of the end: %s", error)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """An interrupt within is raised at the end: a message of which half is sent would leave the other side waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before or signal.default_int_handler)
    if seen:
        raise KeyboardInterrupt


def _reported(error: BaseException) -> BaseException:
    """The error, marked as one that rank 0 says."""
    error.reported = True  # type: ignore[attr-defined]
    return error


def _portable(error: BaseException) -> BaseException:
    """The error, where it survives the way to another process; else one that says the same."""
    try:
        again = pickle.loads(pickle.dumps(error))
        if type(again) is type(error):
            return error
    except Exception as reason:  # anything may go wrong in the reduction of a foreign error
        logger.debug("%s cannot be pickled: %s", type(error).__name__, reason)
    if isinstance(error, StepgymError):
        plain = StepgymError(str(error))
        plain.exit_code = error.exit_code
        return plain
    return RuntimeError(f"{type(error).__name__}: {error}")


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{name} is {text!r} in the environment, not a whole number; start with torchrun") from None


def _device(name: str, local_rank: int, size: int) -> torch.device:
    """The device of a rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device {name!r} is not one; use auto, cpu, cuda, cuda:0, ...") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"device {name!r}: this machine has no CUDA GPU, or torch was built without CUDA; use cpu")
    if size > 1 and device.index is not None:
        raise UserError(f"device {name!r}: {size} processes cannot share one GPU; use cuda or auto")
    number = local_rank if device.index is None else device.index
    if number >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; "
            "start fewer (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", number)
