"""One program of a Gluon kernel for Hopper: its shared memory, its barriers and its scheduler.

Partitions are threads, and only one runs at a time. At each primitive, a seeded scheduler chooses the next one, so a
seed determines an interleaving. Copies arrive in pieces at different times; until then, their target is NaN.

Races do not depend on the interleaving. Every access to shared memory is an event. Each partition knows a set of
events: its own, and those that a barrier or a wait told it. An access that conflicts with an unknown event is a race.
docs/dev/proof.md lists what is not modelled.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch


class Fault(AssertionError):
    """An error in a kernel."""


class _Stopped(BaseException):
    """Ends the other threads of a program after an error."""


# --- shared memory, barriers and operations in flight -----------------------------------------------------------------


class Agent:
    """A partition of the program, with its known events (bits of an int) and its operations in flight."""

    def __init__(self, name: str, known: int) -> None:
        self.name, self.known = name, known
        self.products: list[Product] = []
        self.stores: list[int] = []
        self.go, self.done = threading.Semaphore(0), False
        self.blocked: Callable[[], bool] | None = None
        self.waits_for = ""


class Slot:
    """A buffer, or one of several, in shared memory, with the events of its last writes and of the reads since then."""

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        self.name, self.shape = name, shape
        self.data = torch.full(shape, torch.nan)
        self.writes = self.reads = 0
        self.unfenced: set[str] = set()  # agents that wrote it without a fence since

    def read(self, world: World, known: int, what: str) -> int:
        """Returns the event of an asynchronous read by an agent that knows `known`."""
        if not self.writes:
            raise Fault(f"{what} reads {self.name}, which nothing has written")
        if self.writes & ~known:
            raise Fault(f"{what} reads {self.name} before what is written there is known to have arrived")
        if self.unfenced:
            raise Fault(f"{what} reads {self.name} without a fence after the store to it")
        event = world.event()
        self.reads |= event
        return event

    def write(self, known: int, events: int, what: str) -> None:
        for kind, others in (("read", self.reads), ("written", self.writes)):
            if others & ~known:
                raise Fault(f"{what} overwrites {self.name}, which may still be {kind}")
        self.writes, self.reads = events, 0
        self.data = torch.full(self.shape, torch.nan)
        self.unfenced = set()


class View:
    """A slot in another shape; `transposed` after `permute`."""

    def __init__(self, slot: Slot, shape: tuple[int, ...], transposed: bool = False) -> None:
        self.slot, self.shape, self.transposed = slot, tuple(shape), transposed

    def reshape(self, shape: list[int]) -> View:
        return View(self.slot, tuple(shape))

    def permute(self, order: tuple[int, ...]) -> View:
        assert tuple(order) == (1, 0)
        return View(self.slot, self.shape[::-1], not self.transposed)

    def values(self) -> torch.Tensor:
        shape = self.shape[::-1] if self.transposed else self.shape
        found = self.slot.data.reshape(shape)
        return found.T if self.transposed else found

    def store(self, value: Any) -> None:
        world = World.now
        agent = world.step("store")
        event = world.event()
        self.slot.write(agent.known, event, f"a store of {agent.name}")
        self.slot.data = value.data.reshape(self.slot.shape).clone()
        self.slot.unfenced = {agent.name}
        agent.known |= event


class Memory:
    def __init__(self, dtype: Any, shape: list[int], world: World) -> None:
        self.dtype = dtype
        name = f"memory {len(world.memories)}"
        world.memories.append(self)
        if dtype.name == "int64":
            self.slots: list[Any] = [Barrier(f"{name}[{i}]") for i in range(shape[0])]
            world.barriers += self.slots
        else:
            self.slots = [Slot(f"{name}[{i}]", tuple(shape[1:])) for i in range(shape[0])]

    def index(self, i: int) -> Any:
        if not 0 <= i < len(self.slots):
            raise Fault(f"buffer {i} of {len(self.slots)}")
        slot = self.slots[i]
        return slot if isinstance(slot, Barrier) else View(slot, slot.shape)


class Barrier:
    """An mbarrier. A phase ends after `count` arrivals and when all expected bytes have been copied."""

    def __init__(self, name: str) -> None:
        self.name, self.count, self.pending, self.bytes, self.phase = name, 0, 0, 0, 0
        self.fenced = False  # since it was initialized
        self.gathered = self.told = 0  # events known to the agents that arrived in this phase, and in the last one

    def arrive(self, count: int, known: int, by: str) -> None:
        if self.count == 0:
            raise Fault(f"{by} arrives at {self.name}, which is not initialized")
        self.pending -= count
        if self.pending < 0:
            raise Fault(f"{by} arrives at {self.name}: more arrivals than its {self.count}")
        self.gathered |= known
        self.settle()

    def settle(self) -> None:
        if abs(self.bytes) >= 1 << 20:
            raise Fault(f"{self.bytes} bytes expected at {self.name}")
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.told, self.gathered = self.gathered, 0

    def __str__(self) -> str:
        return f"{self.name}: phase {self.phase}, {self.pending} of {self.count} to arrive, {self.bytes} bytes to come"


class Copy:
    """A piece of a tile in flight to shared memory."""

    def __init__(self, slot: Slot, part: slice, values: torch.Tensor, barrier: Barrier, known: int, size: int) -> None:
        self.slot, self.part, self.values = slot, part, values
        self.barrier, self.known, self.size = barrier, known, size

    def land(self) -> None:
        flat = self.slot.data.view(-1, self.slot.shape[-1])
        flat[self.part] = self.values[self.part]
        self.barrier.gathered |= self.known
        self.barrier.bytes -= self.size
        self.barrier.settle()


class Product:
    """The result of an asynchronous matmul. Before the wait for it, only another matmul may use it."""

    def __init__(self, run: Callable[[], torch.Tensor], event: int) -> None:
        self.run, self.event = run, event
        self.result: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        raise Fault("the result of a product is used before the wait for it")


# --- a program --------------------------------------------------------------------------------------------------------


class World:
    """One program in the interleaving of a seed."""

    now: World

    def __init__(self, seed: int, position: int, count: int) -> None:
        self.random = random.Random(seed)
        self.position, self.count = position, count
        self.events = 0
        self.memories: list[Memory] = []
        self.barriers: list[Barrier] = []
        self.copies: list[Copy] = []
        self.main = Agent("the program", 0)
        self.agents: list[Agent] = []
        self.running = self.main
        self.back = threading.Semaphore(0)
        self.fault: BaseException | None = None
        self.order: list[tuple[str, str]] = []  # (agent, operation)

    def slots(self) -> list[Slot]:
        return [slot for memory in self.memories for slot in memory.slots if isinstance(slot, Slot)]

    def event(self) -> int:
        self.events += 1
        return 1 << (self.events - 1)

    def step(self, what: str, until: Callable[[], bool] | None = None, waits_for: str = "") -> Agent:
        """Each primitive first calls this. Other agents may run first, and must run until `until` is true."""
        agent = self.running
        if agent is not self.main:
            agent.blocked, agent.waits_for = until, waits_for
            self.back.release()
            agent.go.acquire()
            if self.fault is not None:
                raise _Stopped
        elif until is not None and not until():
            raise Fault(f"the program waits for {waits_for} before there is anybody to arrive")
        self.order.append((agent.name, what))
        return agent

    def specialize(self, functions: Any, warps: Any, registers: Any = None) -> None:
        """As in Gluon, the existing 4 warps run the first function, and additional warps run the others."""
        assert len(functions) == len(warps) + 1 == (len(registers) + 1 if registers else len(warps) + 1)
        threads = []
        for i, (function, args) in enumerate(functions):
            agent = Agent(f"partition {i} ({function.__name__})", self.main.known)
            self.agents.append(agent)
            threads.append(threading.Thread(target=self._partition, args=(agent, function, args), daemon=True))
        # Some agents are slow, in some interleavings very slow.
        slow = {id(a): self.random.choice((0.02, 0.3, 1.0)) for a in [*self.agents, None]}
        for thread in threads:
            thread.start()
        while self.fault is None and not all(agent.done for agent in self.agents):
            ready = [a for a in self.agents if not a.done and (a.blocked is None or a.blocked())]
            choices: list[Any] = [*ready, *self.copies]
            if not choices:
                waiting = "; ".join(f"{a.name} waits for {a.waits_for}" for a in self.agents if not a.done)
                self.fault = Fault(f"deadlock: {waiting}")
                break
            weights = [slow[id(c)] if isinstance(c, Agent) else slow[id(None)] for c in choices]
            chosen = self.random.choices(choices, weights)[0]
            if isinstance(chosen, Copy):
                self.copies.remove(chosen)
                chosen.land()
            else:
                self.running = chosen
                chosen.go.release()
                self.back.acquire()
        for agent in self.agents:  # the ones stopped by an error
            agent.go.release()
        for thread in threads:
            thread.join()
        self.running = self.main
        if self.fault is not None:
            raise self.fault
        self._at_the_end()

    def _partition(self, agent: Agent, function: Any, args: Any) -> None:
        try:
            agent.go.acquire()
            if self.fault is None:
                function(*args)
        except _Stopped:
            return
        except BaseException as fault:
            self.fault = fault
        agent.done = True
        self.back.release()

    def _at_the_end(self) -> None:
        if self.copies:
            raise Fault(f"the program ends while {self.copies[0].slot.name} is being copied to")
        for slot in self.slots():
            if slot.writes and not slot.reads:
                raise Fault(f"{slot.name} holds what nobody has read")
        for agent in self.agents:
            if agent.products or agent.stores:
                raise Fault(f"{agent.name} ends without a wait for what it began")
        for barrier in self.barriers:
            if barrier.count and (barrier.pending != barrier.count or barrier.bytes):
                raise Fault(f"an arrival is missing, or one too many: {barrier}")
