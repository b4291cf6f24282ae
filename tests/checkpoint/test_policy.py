from hypothesis import given
from hypothesis import strategies as st

from jaxstack.checkpoint.directory import should_save, steps_to_delete


def test_saves_multiples_and_the_last_step_but_never_step_zero():
    assert [step for step in range(12) if should_save(step, 4, last_step=11)] == [4, 8, 11]
    assert not should_save(0, 4, last_step=0)


def test_keeps_the_newest_and_the_milestones():
    assert steps_to_delete([10, 20, 30, 40, 50], keep=2) == (10, 20, 30)
    assert steps_to_delete([10, 20, 30, 40, 50], keep=2, keep_every_steps=20) == (10, 30)
    assert steps_to_delete([10, 20, 30], keep=1, protected={10}) == (20,)
    assert steps_to_delete([], keep=3) == ()


@given(st.sets(st.integers(1, 1000)), st.integers(1, 5), st.none() | st.integers(1, 50))
def test_never_deletes_the_newest_nor_a_milestone(steps, keep, every):
    deleted = set(steps_to_delete(steps, keep, every))
    assert deleted <= steps
    assert not deleted & set(sorted(steps)[-keep:])
    assert not any(every and step % every == 0 for step in deleted)
    assert len(steps - deleted) <= keep + sum(1 for step in steps if every and step % every == 0)
