"""Trainings as Ray jobs: submit, follow, ask, stop and list them through the Jobs API of a cluster.

Ray alone is needed here, no verl and no torch. A job of ours is marked by its metadata.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from gtpo_verl import __version__
from gtpo_verl.errors import UserError, first_line, reason_in, within
from gtpo_verl.experiments.handover import DIRECTORY, HOOK, HandOver, fingerprint
from gtpo_verl.experiments.package import copy_files, copy_plugin

ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ENTRYPOINT = "exec python -m gtpo_verl.job"  # a shell command, and always this one
CONNECT_TIMEOUT = 10.0  # seconds
REQUEST_TIMEOUT = 60.0  # seconds
UPLOAD_TIMEOUT = 600.0  # seconds
ASK_TIMEOUT = 120.0  # seconds that the job which asks a training to stop may take
POLL = 1.0  # seconds between two looks at a job
PATIENCE = 600.0  # seconds that a cluster may not answer while a job of it is followed, or a sweep's runs are
ENDED = ("STOPPED", "SUCCEEDED", "FAILED")
KILL_AFTER = 120  # seconds from Ray's signal to its SIGKILL
# Modules of Ray that report every file which they pack and upload.
REPORTING = (
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
    "ray._private.runtime_env.packaging",
)
MARK = "gtpo_verl"  # key of a job's metadata: the version that submitted it

Value = TypeVar("Value")


@dataclass(frozen=True)
class JobInfo:
    """A job of ours; ``message``: Ray's on its end."""

    id: str
    status: str
    run_dir: str
    start: datetime | None
    end: datetime | None
    message: str = ""

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        return reason_in(self.message.splitlines()) or "Ray gives no reason."


class Jobs:
    """The jobs of the cluster whose dashboard has an address, by default ``RAY_API_SERVER_ADDRESS`` or this machine's.

    Raises:
        UserError: nothing answers there, or it asks for another token; in one line.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address or os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS
        if "://" not in self.address:
            self.address = f"http://{self.address}"
        if not self.address.startswith(("http://", "https://")):
            raise UserError(f"--address {self.address}: it must be the URL of a Ray dashboard, {DEFAULT_ADDRESS} here.")
        if any(importlib.util.find_spec(name) is None for name in ("ray", "aiohttp", "requests")):
            raise UserError("submitting needs Ray with its client: pip install 'ray[default]'.")
        try:
            self._client = self._call(lambda: _client(self.address), CONNECT_TIMEOUT)
        except (RuntimeError, ValueError, KeyError) as error:  # another server's answer
            raise UserError(f"{self.address} is no Ray cluster that takes jobs: {first_line(error)}") from error

    def submit(self, task: HandOver, submission_id: str, directory: Path, files: Sequence[Path]) -> bool:
        """Submit a task, with this package and the `files` of a directory, see `carried_files`; False if the cluster
        has or had a job of this id. UserError: the cluster refuses the job.
        """
        if self.info(submission_id) is not None:
            return False
        with tempfile.TemporaryDirectory(prefix="gtpo-verl-") as place:
            if files:
                copy_files(directory, files, Path(place) / "files")
            return self._start(Path(place), submission_id, task)

    def info(self, submission_id: str) -> JobInfo | None:
        """What Ray knows of a job of ours; None if it knows none of this id."""
        try:
            return _ours(self._call(lambda: self._client.get_job_info(submission_id), answered=True))
        except RuntimeError as error:
            if "does not exist" in str(error):
                return None
            raise UserError(f"{self.address}: {first_line(error)}") from error

    def known(self, submission_id: str) -> JobInfo:
        """The same of a job that must be there. UserError: there is none."""
        job = self.info(submission_id)
        if job is None:
            raise UserError(f"{submission_id}: no such job on {self.address}; `gtpo-verl submit --list` shows them.")
        return job

    def status(self, submission_id: str) -> str | None:
        """Ray's PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED; None if it knows no job of ours of this id.

        A training that was asked to stop, and saved a checkpoint, has SUCCEEDED; its ``run.json`` says ``interrupted``.
        """
        return job.status if (job := self.info(submission_id)) else None

    def list(self) -> "list[JobInfo]":
        """The trainings among the jobs of the cluster, from the oldest to the newest."""
        jobs = [_ours(job) for job in self._call(lambda: self._client.list_jobs())]
        return sorted((job for job in jobs if job is not None), key=lambda job: job.start or datetime.min)

    def stop(self, submission_id: str, *, grace: float) -> None:
        """Ask the training to stop after its step, with a checkpoint; stop the job if it has not ended in time.

        It is asked through the file ``STOP`` in its run directory, which a small job writes on the node where it was
        started: that file system need not be this machine's. A job that has ended is left alone.

        Args:
            grace: seconds for the step and its checkpoint; 0: the training is interrupted at once.
        """
        job = self.known(submission_id)
        deadline = time.monotonic() + grace
        if job.status == "RUNNING" and self._ask_to_stop(job):
            self._wait(submission_id, deadline)
        if self.status(submission_id) not in ENDED:
            self._call(lambda: self._client.stop_job(submission_id))
            self._wait(submission_id, time.monotonic() + 2 * KILL_AFTER)

    def follow(self, submission_id: str) -> Iterator[str]:
        """The log of a job from its beginning, as text that arrives, until the job ends.

        A connection that is lost is made again, and what was already given is not repeated. UserError: the cluster has
        not answered for `PATIENCE`; the job may go on.
        """
        from aiohttp import ClientError

        given = 0
        lost: float | None = None  # since when the cluster does not answer
        while True:
            passed = 0
            # the connection's failures, not the job's: its status says more
            with contextlib.suppress(RuntimeError, OSError, ClientError):
                for text in self._tail(submission_id):
                    fresh = text[max(0, given - passed) :]
                    passed += len(text)
                    if fresh:
                        given += len(fresh)
                        yield fresh
            try:
                status, lost = self.status(submission_id), None
            except UserError as error:
                if lost is None:
                    print(f"{error} Waiting for it.", file=sys.stderr, flush=True)
                    lost = time.monotonic()
                if time.monotonic() - lost > PATIENCE:
                    raise
            else:
                if status is None or status in ENDED:
                    return
            time.sleep(POLL)

    def _tail(self, submission_id: str) -> Iterator[str]:
        """Ray's log of a job, an iterator of its asynchronous one."""
        chunks = self._client.tail_job_logs(submission_id)

        async def next_chunk() -> str | None:
            return await anext(chunks, None)

        with asyncio.Runner() as runner:
            while (text := runner.run(next_chunk())) is not None:
                yield text

    def _ask_to_stop(self, job: JobInfo) -> bool:
        """Write the file STOP where the training was started; False if none writes to the run directory there."""
        helper = f"{job.id}-stop-{uuid.uuid4().hex[:8]}"
        with tempfile.TemporaryDirectory(prefix="gtpo-verl-") as place:
            self._start(Path(place), helper, HandOver(action="stop", run_dir=job.run_dir))
        asked = self._wait(helper, time.monotonic() + ASK_TIMEOUT) == "SUCCEEDED"
        with contextlib.suppress(UserError):  # it has not ended: nothing depends on its entry in the list
            self._call(lambda: self._client.delete_job(helper))
        return asked

    def _wait(self, submission_id: str, deadline: float) -> str | None:
        """Wait for the end of a job; returns its last status."""
        while True:
            status: str = self._call(lambda: self._client.get_job_status(submission_id)).value
            if status in ENDED or time.monotonic() > deadline:
                return status
            time.sleep(POLL)

    def _start(self, place: Path, submission_id: str, task: HandOver) -> bool:
        """Submit what lies in ``place``, an empty directory but for the user's ``files``, and the plugin."""
        plugin, metadata = copy_plugin(place)
        replace(task, plugin=fingerprint(plugin)).write(place / DIRECTORY)
        runtime_env: dict[str, Any] = {
            "py_modules": [str(plugin), str(metadata), str(place / DIRECTORY)],
            "worker_process_setup_hook": HOOK,
            # The training's Ctrl-C: asked to stop already, it stops at once; else after its step.
            "env_vars": {"RAY_JOB_STOP_SIGNAL": "SIGINT", "RAY_JOB_STOP_WAIT_TIME_S": str(KILL_AFTER)},
        }
        if (place / "files").is_dir():
            runtime_env["working_dir"] = str(place / "files")
        marks = {MARK: __version__, "action": task.action, "run_dir": task.run_dir}
        job = {"submission_id": submission_id, "runtime_env": runtime_env, "metadata": marks}
        try:
            self._call(lambda: self._client.submit_job(entrypoint=ENTRYPOINT, **job), UPLOAD_TIMEOUT, answered=True)
        except RuntimeError as error:
            if f"{submission_id} already exists" in str(error):
                return False
            last_line = (str(error).strip() or type(error).__name__).splitlines()[-1]  # of a stack trace
            raise UserError(f"{self.address} refuses the job: {last_line}") from error
        return True

    def _call(self, request: Callable[[], Value], seconds: float = REQUEST_TIMEOUT, *, answered: bool = False) -> Value:
        """Make a request; a failure is a UserError. answered: not where it is the cluster's answer, a RuntimeError."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            return within(seconds, request)
        except AuthenticationError as error:
            raise UserError(
                f"{self.address} asks for Ray's authentication token, and this machine has none or another: copy "
                "~/.ray/auth_token from the head node, or set RAY_AUTH_TOKEN_PATH."
            ) from error
        except RuntimeError as error:
            if answered:
                raise
            raise UserError(f"{self.address}: {first_line(error)}") from error
        except (TimeoutError, OSError, requests.exceptions.RequestException) as error:
            raise UserError(
                f"no Ray cluster answers at {self.address} ({first_line(error)[:120]}): name its dashboard by "
                f"--address or {ADDRESS_VARIABLE}; `ray start --head` starts one."
            ) from error


def _client(address: str) -> Any:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for module in REPORTING:
        logging.getLogger(module).setLevel(logging.WARNING)
    before = os.environ.pop(ADDRESS_VARIABLE, None)  # for Ray the variable wins over the argument
    try:
        return JobSubmissionClient(address)
    except AuthenticationError:  # Ray sends its token, from where it looks for it, only with RAY_AUTH_MODE=token
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        token = os.environ.get("RAY_AUTH_TOKEN") or (file.read_text().strip() if file.is_file() else None)
        if token is None:
            raise
        return JobSubmissionClient(address, headers={"Authorization": f"Bearer {token}"})
    finally:
        if before is not None:
            os.environ[ADDRESS_VARIABLE] = before


def _ours(job: Any) -> JobInfo | None:
    """A training of ours from Ray's description of a job; None for other jobs, and for those that ask one to stop."""
    metadata = job.metadata or {}
    if MARK not in metadata or metadata.get("action") == "stop":
        return None
    start, end = (None if one is None else datetime.fromtimestamp(one / 1000) for one in (job.start_time, job.end_time))
    return JobInfo(job.submission_id, job.status.value, metadata["run_dir"], start, end, job.message or "")
