"""What goes over channels and to handlers is plain MessagePack: another library reads it, and writes it."""

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from invoker.handlers.protocol import LENGTH_BYTES, CallFailed, CallValue, encode, to_node

values = st.integers(0, 2**63 - 1)


@given(values, st.binary(max_size=300), st.booleans())
def test_another_library_reads_frames_of_handlers(call: int, data: bytes, stream: bool) -> None:
    body = encode(CallValue(call=call, data=data, stream=stream))[LENGTH_BYTES:]
    found = msgpack.unpackb(body)
    assert {"call": call, "data": data, "stream": stream}.items() <= found.items()


@given(values, st.text(max_size=300))
def test_frames_that_another_library_wrote_are_read(call: int, message: str) -> None:
    frame = CallFailed(call=call, kind="raised", message=message)
    body = msgpack.packb(msgpack.unpackb(encode(frame)[LENGTH_BYTES:]))
    assert to_node.decode(body) == frame
