from omni_bus.core.tombstones import Tombstones


def test_oldest_go_first():
    tombstones: Tombstones[str] = Tombstones(limit=2)
    for request in "abc":
        tombstones.bury(request)

    assert [request in tombstones for request in "abc"] == [False, True, True]
    assert len(tombstones) == 2


def test_burying_again_renews():
    tombstones: Tombstones[str] = Tombstones(limit=2)
    for request in "abac":
        tombstones.bury(request)

    assert [request in tombstones for request in "abc"] == [True, False, True]


def test_epitaph_tells_how_it_ended():
    tombstones: Tombstones[str] = Tombstones()
    tombstones.bury("a", "well")
    tombstones.bury("b")

    assert tombstones.epitaph("a") == "well"
    assert tombstones.epitaph("b") is None
    assert tombstones.epitaph("unknown") is None
