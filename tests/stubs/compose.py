"""Runs the services of a compose file as local processes: their own commands and environments, on loopback.

A service's name and port become 127.0.0.1 and a free port, a volume becomes a directory, and the entry point of
its image is read from its Dockerfile. Nothing else of a container is imitated.
"""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvlease.dev.embedded_etcd import find_etcd
from kvlease.dev.engine_process import free_ports, lower_progress_threads
from kvlease.runtime.child_process import tied_to_this_process

DEPLOY = Path(__file__).parents[2] / "deploy"
BINARIES = Path(sys.executable).parent
HEALTHY_S = 180.0
STOP_S = 60.0
VARIABLE = re.compile(r"\$\{(\w+)\}")


# A machine with two cores runs all of it: an answer that takes a millisecond elsewhere may take long.
PATIENCE = {
    "KVLEASE_ROUTER_REGISTRY_CALL_S": "10",
    "KVLEASE_REGISTRY_SIDECAR_CALL_S": "8",
    "KVLEASE_REGISTRY_STORE_CALL_S": "3",
    "KVLEASE_SIDECAR_PIN_CALL_S": "5",
    "KVLEASE_SIDECAR_PEER_CALL_S": "7",
    "KVLEASE_SIDECAR_HOLDER_CALL_S": "5",
    "KVLEASE_SIDECAR_STORE_CALL_S": "3",
    "KVLEASE_SIM_PIN_WAIT_S": "9",
}
# What loopback and an etcd from a package need.
THIS_MACHINE = {
    "KVLEASE_SIDECAR_ALLOW_LOOPBACK": "true",
    "KVLEASE_REGISTRY_ETCD_ACCEPT_OLD": "true",
    "KVLEASE_SIDECAR_ETCD_ACCEPT_OLD": "true",
    "ETCDCTL_API": "3",
}


def read_variables(path: Path) -> dict[str, str]:
    """The variables of an `.env` file."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def read_compose(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """A compose file with its variables filled in; one that is not there is a KeyError."""
    return yaml.safe_load(VARIABLE.sub(lambda found: variables[found[1]], path.read_text()))


def entrypoint_of(dockerfile: Path) -> list[str]:
    """The entry point of the image that a Dockerfile builds."""
    return json.loads(re.findall(r"^ENTRYPOINT (.*)$", dockerfile.read_text(), re.MULTILINE)[-1])


def build_of(spec: Mapping[str, Any], services: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """How the image of a service is built: one service says so for all that run it."""
    return next(
        (one["build"] for one in services.values() if one["image"] == spec["image"] and "build" in one), None
    )


@dataclass
class LocalService:
    """One service, its ports here, and its process once it was started."""

    name: str
    spec: Mapping[str, Any]
    ports: dict[int, int]
    process: Process | None = None


@dataclass
class LocalFleet:
    """Services as processes.

    Attributes:
        programs: name of a program in a container -> where it is here.
        more_environment: variables that a service gets besides its own.
    """

    compose: Mapping[str, Any]
    profile: str
    folder: Path
    directory: Path
    programs: Mapping[str, Path]
    more_environment: Mapping[str, str]
    services: dict[str, LocalService] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chosen = {
            name: spec
            for name, spec in self.compose["services"].items()
            if self.profile in spec.get("profiles", [self.profile])
        }
        wanted = [(name, int(port)) for name, spec in chosen.items() for port in spec.get("expose", [])]
        taken = dict(zip(wanted, free_ports(len(wanted)), strict=True))
        for name, spec in chosen.items():
            ports = {port: free for (owner, port), free in taken.items() if owner == name}
            self.services[name] = LocalService(name, spec, ports)

    def address(self, name: str, port: int) -> str:
        """Where a service's port is here."""
        return f"127.0.0.1:{self.services[name].ports[port]}"

    async def start(self, order: Sequence[str]) -> None:
        """Starts every service in this order, without waiting for any."""
        assert sorted(order) == sorted(self.services)
        for name in order:
            service = self.services[name]
            with self._log(name).open("wb") as log:
                service.process = await self._spawn(service, self.command(service), log)

    async def healthy(self, timeout_s: float = HEALTHY_S) -> None:
        """Waits until the health check of every service passes."""
        async with asyncio.timeout(timeout_s):
            for service in self.services.values():
                check = self._local(service, service.spec["healthcheck"]["test"][1:])
                while await (await self._spawn(service, check, DEVNULL)).wait() != 0:
                    assert service.process is not None
                    assert service.process.returncode is None, self.log_of(service.name)
                    await asyncio.sleep(0.2)
        for service in self.services.values():
            assert service.process is not None
            lower_progress_threads(service.process.pid)

    async def stop(self) -> dict[str, int]:
        """Ends every process. What each ended with."""
        running = {name: service.process for name, service in self.services.items() if service.process}
        for process in running.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                for process in running.values():
                    await process.wait()
        except TimeoutError:
            for process in running.values():
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        return {name: process.returncode or 0 for name, process in running.items()}

    def log_of(self, name: str) -> str:
        """The end of what a service wrote."""
        return f"{name}:\n{self._log(name).read_text(errors='replace')[-4000:]}"

    def command(self, service: LocalService) -> list[str]:
        """The command line of a service, for this machine."""
        spec = service.spec
        entrypoint = spec.get("entrypoint")
        if entrypoint is None and (build := build_of(spec, self.compose["services"])):
            entrypoint = entrypoint_of(self.folder.parent / build["dockerfile"])
        return self._local(service, [*(entrypoint or []), *spec["command"]])

    def environment(self, service: LocalService) -> dict[str, str]:
        """The environment of a service, for this machine."""
        own = {
            name: str(service.ports[int(value)])
            if name.endswith("_PORT")
            else self._text(service, str(value))
            for name, value in service.spec.get("environment", {}).items()
            if value is not None  # it would come from the shell
        }
        path = os.pathsep.join(
            (*sorted({str(program.parent) for program in self.programs.values()}), os.defpath)
        )
        return {
            "PATH": path,
            "HOME": str(self.directory),
            "PYTHONUNBUFFERED": "1",
            **self.more_environment,
            **own,
        }

    def _local(self, service: LocalService, command: Sequence[str]) -> list[str]:
        program, *arguments = command
        return [str(self.programs[program]), *(self._argument(service, argument) for argument in arguments)]

    def _argument(self, service: LocalService, argument: str) -> str:
        option, _, value = argument.partition("=")
        if option.endswith("port") and value.isdigit():
            return f"{option}={service.ports[int(value)]}"
        if option == "--host":
            return f"{option}=127.0.0.1"
        return self._text(service, argument)

    def _text(self, service: LocalService, text: str) -> str:
        hosts = {name: other for other in self.services.values() for name in names_of(other.name, other.spec)}
        hosts |= {"0.0.0.0": service, "127.0.0.1": service}
        names = "|".join(re.escape(name) for name in sorted(hosts, key=len, reverse=True))

        def here(found: re.Match[str]) -> str:
            return f"127.0.0.1:{hosts[found[1]].ports[int(found[2])]}"

        text = re.sub(rf"(?<![\w.-])({names}):(\d+)\b", here, text)
        for source, target in self._mounts(service).items():
            text = text.replace(source, str(target))
        return text

    def _mounts(self, service: LocalService) -> dict[str, Path]:
        """Path in the container -> directory here."""
        mounts = {}
        for volume in service.spec.get("volumes", []):
            source, target = volume.split(":")[:2]
            mounts[target] = self.directory / source
        for tmpfs in service.spec.get("tmpfs", []):
            target = tmpfs.split(":")[0]
            if target != "/tmp":
                mounts[target] = self.directory / f"{service.name}{target.replace('/', '-')}"
        return mounts

    async def output_of(self, name: str, command: Sequence[str]) -> tuple[int, str]:
        """Exit status and output of a command that is run beside a service, as `docker compose exec` does."""
        service = self.services[name]
        process = await self._spawn(service, self._local(service, command), PIPE)
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    async def _spawn(self, service: LocalService, command: Sequence[str], output: Any) -> Process:
        return await asyncio.create_subprocess_exec(
            *tied_to_this_process(command),
            env=self.environment(service),
            cwd=self.directory,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"


def names_of(name: str, spec: Mapping[str, Any]) -> list[str]:
    """The hosts by which others reach a service: its name and its aliases."""
    networks = spec.get("networks", {})
    details = networks.values() if isinstance(networks, dict) else []
    return [name, *(alias for detail in details if detail for alias in detail.get("aliases", []))]


def local_fleet(
    profile: str,
    directory: Path,
    variables: Mapping[str, str],
    programs: Mapping[str, Path] | None = None,
    environment: Mapping[str, str] | None = None,
) -> LocalFleet:
    """The services of compose.yaml under a profile; `programs` and `environment` are what its engines need."""
    etcd = find_etcd()
    known = {name: BINARIES / name for name in ("kvlease", "python", "python3")}
    known |= {"etcd": etcd, "etcdctl": etcd.with_name("etcdctl")}
    compose = read_compose(DEPLOY / "compose.yaml", variables)
    return LocalFleet(
        compose,
        profile,
        DEPLOY,
        directory,
        known | dict(programs or {}),
        PATIENCE | THIS_MACHINE | dict(environment or {}),
    )
