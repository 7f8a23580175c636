"""Ranks and coordinates: arithmetic both ways, groups, and what a mesh refuses."""

import copy
import itertools

import pytest

from partbook.core import Mesh

SIZES = [(1, 1, 1), (1, 1, 4), (2, 3, 4), (3, 1, 2), (2, 2, 2)]


@pytest.mark.parametrize(("dp", "pp", "tp"), SIZES)
def test_rank_and_coordinates_determine_each_other(dp, pp, tp):
    places = list(itertools.product(range(pp), range(dp), range(tp)))
    meshes = [Mesh(dp=dp, pp=pp, tp=tp, rank=rank) for rank in range(dp * pp * tp)]
    # tp neighbours first, then dp, then pp
    assert [(mesh.pp_rank, mesh.dp_rank, mesh.tp_rank) for mesh in meshes] == places
    assert [(mesh.pp_rank * dp + mesh.dp_rank) * tp + mesh.tp_rank for mesh in meshes] == list(range(meshes[0].size))
    assert [meshes[0].at(rank) for rank in range(meshes[0].size)] == meshes


@pytest.mark.parametrize(("dp", "pp", "tp"), SIZES)
@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_groups_part_the_ranks_into_lines_along_one_axis(dp, pp, tp, axis):
    mesh = Mesh(dp=dp, pp=pp, tp=tp)
    groups = mesh.rank_groups(axis)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    assert groups == sorted(groups)
    for group in groups:
        there = [mesh.at(rank) for rank in group]
        assert [getattr(place, f"{axis}_rank") for place in there] == list(range(getattr(mesh, axis)))
        for other in {"dp", "pp", "tp"} - {axis}:
            assert len({getattr(place, f"{other}_rank") for place in there}) == 1


def test_groups_of_a_known_mesh():
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert mesh.rank_groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.rank_groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.rank_groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_mesh_is_virtual_where_tp_ranks_cannot_talk():
    group = object()
    assert not Mesh().is_virtual
    assert not Mesh(dp=4, rank=3).is_virtual
    assert Mesh(tp=2).is_virtual
    real = Mesh(tp=2, tp_group=group)
    assert not real.is_virtual
    assert real.at(1).is_virtual


def test_mesh_is_not_copied_with_a_model():
    """Process groups cannot be copied, and a copied model is on the same mesh."""
    mesh = Mesh(tp=2, tp_group=object())
    assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "Mesh(tp=0): a parallel size is at least 1"),
        ({"dp": -1}, "Mesh(dp=-1): a parallel size is at least 1"),
        ({"pp": 0}, "Mesh(pp=0)"),
        ({"dp": 2, "tp": 2, "rank": 4}, "rank 4 lies outside the mesh dp=2 pp=1 tp=2, which has ranks 0 to 3"),
        ({"rank": -1}, "rank -1 lies outside the mesh dp=1 pp=1 tp=1, which has ranks 0 to 0"),
    ],
)
def test_impossible_mesh_is_refused_with_its_numbers(sizes, message):
    with pytest.raises(ValueError) as caught:
        Mesh(**sizes)
    assert message in str(caught.value)
