"""Every spelling of replica groups gives the ids that it stands for."""

import numpy as np
import pytest

from jaxstack.observe.collectives import mesh_axes_of, permute_pairs, replica_groups


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups={}, dimensions={0}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("dimensions={0}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("replica_groups=[2,4]<=[8], x", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0), x", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        # b is 2 x 2; its slow half is (1)2, its fast half (2)2
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        (
            "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, x",
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}, x", ((0, 1), (2, 3))),
        ("source_target_pairs={{1,2},{0,1},{3,3}}, x", ((0, 1, 2),)),
    ],
)
def test_spellings(text, groups):
    assert replica_groups("channel_id=1, " + text, 8) == groups


def test_piece_of_an_axis_in_the_middle():
    (first, *_) = replica_groups("replica_groups=mesh['a'=8,'b'=2] {'a':(2)2}", 16)
    ids = np.arange(16).reshape(2, 2, 2, 2)  # a = slow, middle, fast; b
    assert first == tuple(ids[0, :, 0, 0])


def test_axes():
    axes = {"data": 2, "fsdp": 1, "tensor": 4}
    assert mesh_axes_of([(0, 1, 2, 3)], axes) == ("tensor",)
    assert mesh_axes_of([(0, 4)], axes) == ("data",)
    assert mesh_axes_of([(0, 5)], axes) == ("data", "tensor")
    assert mesh_axes_of([(3,)], axes) == ()
    with pytest.raises(ValueError, match="do not fit"):
        mesh_axes_of([(0, 8)], axes)


def test_pairs_to_itself_are_no_traffic():
    assert permute_pairs("source_target_pairs={{0,0},{1,2}}") == [(1, 2)]
