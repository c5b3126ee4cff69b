from omni_bus.core.kept import MAX_KEPT_BYTES, KeptInput
from omni_bus.wire.payloads import Text

A, B = Text("a"), Text("b")


def test_input_comes_back_in_the_order_of_sending():
    kept = KeptInput()
    kept.add("prompt", A, 1)
    kept.finish("prompt")
    kept.add("image", B, 1)

    assert list(kept) == [("prompt", A), ("prompt", None), ("image", B)]


def test_limit_counts_bytes_of_all_ports():
    kept = KeptInput()
    kept.add("prompt", A, MAX_KEPT_BYTES - 1)
    assert not kept.is_too_large

    kept.add("image", B, 2)
    assert kept.is_too_large
