"""Real damage on disk: every flipped bit, cut or missing file is noticed, named, and passed over."""

import errno
import hashlib
import json
import os
import random
import shutil

import pytest

from jaxstack.checkpoint.leaves import abstract_state
from jaxstack.errors import ConfigError, JaxstackError
from tests.checkpoint.states import assert_same, make_state


def files_of(step_directory):
    return sorted(path for path in step_directory.rglob("*") if path.is_file())


@pytest.fixture
def two(open_manager, tmp_path):
    """The directory of checkpoints 1 and 2, and a copy of 2 to repair it from."""
    manager = open_manager()
    for step in (1, 2):
        manager.save(step, make_state(step), {"seed": step}, wait=True)
    manager.close()
    shutil.copytree(manager.directory / "2", tmp_path / "copy")
    return manager.directory


def repair(directory):
    shutil.rmtree(directory / "2")
    shutil.copytree(directory.parent / "copy", directory / "2")


@pytest.mark.longer
def test_forty_flipped_bits_are_all_noticed(two, open_manager, warnings):
    chance = random.Random(0)
    for _ in range(40):
        victim = chance.choice([path for path in files_of(two / "2") if path.stat().st_size])
        content = bytearray(victim.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(content)
        warnings.clear()
        manager = open_manager()
        assert manager.latest_step() == 1, f"bit {bit} of {victim.name}"
        assert len(warnings) == 1 and str(two / "2") in warnings[0]
        with pytest.raises(JaxstackError, match="damaged"):
            manager.restore(2, abstract_state(make_state(2)))
        repair(two)
    manager = open_manager()
    assert manager.latest_step() == 2
    assert_same(manager.restore(2, abstract_state(make_state(2)))[0], make_state(2))


def test_the_flipped_file_is_named(two, open_manager, warnings):
    victim = max(files_of(two / "2"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 16
    victim.write_bytes(content)
    assert open_manager().latest_step() == 1
    assert victim.relative_to(two / "2").as_posix() in warnings[0]


@pytest.mark.longer
def test_each_file_cut_or_deleted_is_noticed(two, open_manager, warnings):
    for name in [path.relative_to(two / "2") for path in files_of(two / "2")]:
        size = (two / "2" / name).stat().st_size
        for left in {None, 0, size // 2, size - 1} - {size, -1}:
            victim = two / "2" / name
            content = victim.read_bytes()
            victim.unlink()
            if left is not None:
                victim.write_bytes(content[:left])
            warnings.clear()
            assert open_manager().latest_step() == 1, name
            assert len(warnings) == 1 and name.as_posix() in warnings[0]
            repair(two)


def test_a_manifest_cut_after_any_line_is_noticed(two, open_manager):
    manifest = two / "2" / "SHA256SUMS"
    lines = manifest.read_text().splitlines(keepends=True)
    for count in range(len(lines)):
        manifest.write_text("".join(lines[:count]))
        assert open_manager().latest_step() == 1


def test_damage_after_a_check_is_still_noticed(two, open_manager):
    manager = open_manager()
    assert manager.latest_step() == 2
    victim = max(files_of(two / "2"), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[::-1])
    with pytest.raises(JaxstackError, match="damaged"):
        manager.restore(2, abstract_state(make_state(2)))


def test_a_checkpoint_under_another_number_is_noticed(two, open_manager, warnings):
    (two / "2").rename(two / "9")
    assert open_manager().latest_step() == 1
    assert "belongs to step 2, not 9" in warnings[0]


def test_all_damaged_is_an_error_that_says_what_to_do(two, open_manager):
    for step in ("1", "2"):
        (two / step / "checkpoint.json").unlink()
    with pytest.raises(JaxstackError, match="every .* is damaged .*checkpoint.json.* move the"):
        open_manager().latest_step()


def test_strangers_are_named_left_alone_and_never_loaded(two, open_manager, warnings):
    (two / "3").mkdir()
    (two / "4").mkdir()
    (two / "4" / "arrays").mkdir()
    (two / "5").symlink_to(two / "2")
    (two / "6").write_text("a file")
    (two / "007").mkdir()
    (two / "notes.txt").write_text("mine")
    (two / ".saving-8-1").mkdir()
    (two / ".saving-8-1" / "part").write_text("half")
    manager = open_manager()
    assert manager.latest_step() == 2
    for name in ("3", "4", "5", "6", "007", "notes.txt", ".saving-8-1"):
        assert any(str(two / name) in line for line in warnings), name
    assert manager.latest_step() == 2 and len(warnings) == 7
    assert_same(manager.restore(2, abstract_state(make_state(2)))[0], make_state(2))
    manager.save(4, make_state(4), wait=True)
    assert manager.latest_step() == 4
    names = {path.name for path in two.iterdir()}
    assert {"1", "2", "3", "4", "5", "6", "007", "notes.txt"} <= names
    assert ".saving-8-1" not in names
    assert any("4.moved-aside" in name for name in names)


def test_pipes_and_devices_in_place_of_files_are_not_read(two, open_manager, warnings):
    for name in ("SHA256SUMS", "checkpoint.json"):
        for stand_in in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
            (two / "2" / name).unlink()
            stand_in(two / "2" / name)
            warnings.clear()
            assert open_manager().latest_step() == 1 and name in warnings[0]
            repair(two)


def test_names_that_no_step_has(two, open_manager, warnings):
    """A number beyond those of a state's int32 counter, and bytes that are no text."""
    shutil.copytree(two / "2", two / "99999999999")
    os.mkdir(os.fsencode(two) + b"/\xff")
    assert open_manager().latest_step() == 2
    assert len(warnings) == 2 and all(line.isprintable() and "ignored" in line for line in warnings)


def test_a_folder_that_may_not_be_read_is_passed_over(two, open_manager, warnings, monkeypatch):
    """Mode 0 does not stop root, who may be the one that runs this."""
    listdir = os.listdir

    def refuse(path="."):
        if str(path) == str(two / "2"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuse)
    assert open_manager().latest_step() == 1
    assert str(two / "2") in warnings[0] and "Permission denied" in warnings[0]


def rewrite_index(directory, change):
    """Changes the index of checkpoint 2, and its hash with it."""
    path = directory / "2" / "checkpoint.json"
    sums = directory / "2" / "SHA256SUMS"
    index = json.loads(path.read_text())
    changed = change(index)
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    lines = sums.read_text().splitlines()[:-1]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sums.write_text("\n".join([*lines, f"{digest}  checkpoint.json"]) + "\n")


def test_an_index_that_is_none_is_passed_over(two, open_manager, warnings):
    def leaves(**fields):
        return lambda index: {
            **index, "leaves": {name: {**leaf, **fields} for name, leaf in index["leaves"].items()},
        }  # fmt: skip

    for change in (
        lambda index: [index], lambda index: {**index, "leaves": None}, lambda index: {"format": 1},
        lambda index: "{", lambda index: "[" * 100_000, lambda index: {**index, "saved_at": {}},
        lambda index: {**index, "leaves": {"x": None}}, leaves(shape="abc"), leaves(dtype=[5]), leaves(key_impl=5),
    ):  # fmt: skip
        rewrite_index(two, change)
        warnings.clear()
        assert open_manager().latest_step() == 1 and "not the index of a checkpoint" in warnings[0]
        repair(two)


@pytest.mark.parametrize("impl", ["mersenne", "rbg", None])
def test_keys_of_a_generator_that_is_none_are_refused(two, open_manager, impl):
    """As another version of jax might have one."""

    def renamed(index):
        for leaf in index["leaves"].values():
            if leaf.pop("key_impl", None) and impl:
                leaf["key_impl"] = impl
        return index

    rewrite_index(two, renamed)
    with pytest.raises(ConfigError, match=f"key<fry> of {impl!r}, which is no such random generator"):
        open_manager().restore(2, abstract_state(make_state(2)))


@pytest.mark.parametrize("name", ["checkpoint.json", "SHA256SUMS"])
def test_a_giant_in_place_of_an_index_is_not_read(two, open_manager, warnings, name):
    os.truncate(two / "2" / name, 2**40)  # a hole: no byte of it is on the disk
    assert open_manager().latest_step() == 1
    assert f"{name}: {2**40} bytes" in warnings[0]


def test_another_format_is_an_error_and_not_damage(two, open_manager):
    """Going on from an older checkpoint would throw away what a newer version has trained."""
    rewrite_index(two, lambda index: {**index, "format": 2})
    with pytest.raises(ConfigError, match="has format 2, this jaxstack reads 1"):
        open_manager().latest_step()


def test_files_outside_of_the_checkpoint_are_not_looked_at(two, open_manager, warnings):
    sums = two / "2" / "SHA256SUMS"
    for name in ("../1/checkpoint.json", "/etc/passwd"):
        sums.write_text(f"{'0' * 64}  {name}\n" + sums.read_text())
        warnings.clear()
        assert open_manager().latest_step() == 1 and "not a hash and a name below it" in warnings[0]
        repair(two)


def test_files_in_place_of_working_folders_are_removed(two, open_manager):
    for name in (".saving-3-1", ".deleting-1"):
        (two / name).write_text("a file")
    manager = open_manager(keep=1)
    manager.save(3, make_state(3), wait=True)
    assert manager.latest_step() == 3 and sorted(path.name for path in two.iterdir()) == [".lock", "3"]


def test_a_link_in_the_way_of_a_save_is_moved_aside(two, open_manager):
    (two / "5").symlink_to(two / "2")
    manager = open_manager()
    manager.save(5, make_state(5), wait=True)
    assert manager.latest_step() == 5 and not (two / "5").is_symlink()
    assert_same(manager.restore(2, abstract_state(make_state(2)))[0], make_state(2))


def test_saving_over_a_damaged_step_repairs_it(two, open_manager):
    (two / "2" / "SHA256SUMS").write_bytes(b"\0")
    manager = open_manager()
    assert manager.latest_step() == 1
    manager.save(2, make_state(5), wait=True)
    assert manager.latest_step() == 2
    assert_same(manager.restore(2, abstract_state(make_state(5)))[0], make_state(5))


def test_damaged_ones_do_not_count_as_kept(two, open_manager):
    (two / "2" / "checkpoint.json").unlink()
    manager = open_manager(keep=2)
    manager.save(3, make_state(3), wait=True)
    assert {1, 3} <= set(manager.all_steps())


@pytest.mark.parametrize("name", ["the largest", "checkpoint.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_does_not_count_towards_keep(name, two, open_manager, warnings):
    """The newest is damaged without a change of size: the intact one before it stays for it."""
    largest = max(files_of(two / "2"), key=lambda path: path.stat().st_size)
    victim = largest if name == "the largest" else two / "2" / name
    content = bytearray(victim.read_bytes())
    content[0] ^= 1
    victim.write_bytes(content)
    manager = open_manager(keep=2)
    manager.save(3, make_state(3), wait=True)
    assert sorted(path.name for path in two.iterdir() if path.name.isdigit()) == ["1", "2", "3"]
    assert any("checkpoint.keep" in line and str(two / "2") in line for line in warnings)
    manager.save(4, make_state(4), wait=True)
    manager.close()
    assert {"3", "4"} <= {path.name for path in two.iterdir()} and not (two / "1").exists()
