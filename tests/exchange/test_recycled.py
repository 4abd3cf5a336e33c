"""Memory that is used again: never while anybody holds an array in it."""

from __future__ import annotations

from hvdcomp.exchange.recycled import Recycled

SHAPES = [(5,), (4, 4), (), (10, 10)]


def test_arrays_have_their_shapes_and_begin_with_cache_lines_of_their_own() -> None:
    arrays, addresses = Recycled(SHAPES).arrays()
    assert [array.shape for array in arrays] == SHAPES
    assert addresses.tolist() == [array.__array_interface__["data"][0] for array in arrays]
    assert all(address % 64 == 0 for address in addresses)
    for number, array in enumerate(arrays):
        array[...] = number
    assert [set(array.reshape(-1).tolist()) for array in arrays] == [{0.0}, {1.0}, {2.0}, {3.0}]


def test_memory_is_used_again_when_the_last_array_in_it_is_gone() -> None:
    memory = Recycled(SHAPES)
    arrays, first = memory.arrays()
    part = arrays[3][2:4]
    del arrays
    part[...] = 7
    others, second = memory.arrays()
    for array in others:
        array[...] = 0
    assert set(first.tolist()).isdisjoint(second.tolist())
    assert (part == 7).all()
    del part
    _, third = memory.arrays()
    assert third.tolist() == first.tolist()


def test_of_all_that_is_free_one_is_kept() -> None:
    memory = Recycled([(1000,)])
    held = [memory.arrays() for _ in range(4)]
    assert len({at.item() for _, at in held}) == 4
    del held
    first = memory.arrays()[1]
    assert len(memory._used) == 1
    assert memory.arrays()[1].tolist() == first.tolist()
