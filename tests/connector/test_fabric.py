"""Which RDMA devices the processes of an engine have open."""

from pathlib import Path

from kvlease_vllm.fabric import fabric_handles


def process(proc: Path, number: int, children: tuple[int, ...] = (), files: tuple[str, ...] = ()) -> None:
    thread = proc / str(number) / "task" / str(number)
    thread.mkdir(parents=True)
    (thread / "children").write_text(" ".join(map(str, children)))
    handles = proc / str(number) / "fd"
    handles.mkdir()
    for place, target in enumerate(files):
        (handles / str(place)).symlink_to(target)


def test_devices_of_the_engine_and_its_workers_count_and_nobody_elses(tmp_path: Path) -> None:
    process(tmp_path, 1, (2, 3), ("/dev/null",))
    process(tmp_path, 2, (), ("/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1"))
    process(tmp_path, 3, (4,), ("socket:[17]",))
    process(tmp_path, 4, (), ("/dev/infiniband/uverbs0",))
    process(tmp_path, 5, (), ("/dev/infiniband/uverbs0",))
    assert fabric_handles(tmp_path, 1) == 3


def test_an_engine_over_sockets_has_none_open_and_a_worker_that_left_is_passed_over(tmp_path: Path) -> None:
    process(tmp_path, 1, (2,), ("socket:[17]",))
    assert fabric_handles(tmp_path, 1) == 0


def test_this_process_can_be_asked() -> None:
    assert fabric_handles() == 0
