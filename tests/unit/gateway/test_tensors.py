"""Tensors of the Open Inference Protocol, as tritonclient writes and reads them."""

from array import array

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import ApiError
from gateway.core.settings import RequestLimits
from gateway.requests.tensors import byte_strings, encode_response, parse_inference, pixel_array, token_ids
from gateway.schemas.open_inference import InferResponse

LIMITS = RequestLimits()


def written(*tensors: tuple[str, np.ndarray, str], binary: bool) -> tuple[bytes, bytes | None]:
    """Return a request's body, and the length of its JSON, as the official client makes them."""
    inputs = []
    for name, data, kind in tensors:
        made = triton.InferInput(name, list(data.shape), kind)
        made.set_data_from_numpy(data, binary_data=binary)
        inputs.append(made)
    body, length = triton.InferenceServerClient.generate_request_body(inputs)
    return body, None if length is None else b"%d" % length


@given(texts=st.lists(st.text(), min_size=1, max_size=5), binary=st.booleans())
def test_texts(texts: list[str], binary: bool) -> None:
    elements = [one.encode() if binary else one for one in texts]
    body, length = written(("text", np.array(elements, dtype=np.object_), "BYTES"), binary=binary)
    found = byte_strings(parse_inference(body, length, LIMITS).tensors["text"], 5)
    assert found == [text.encode() for text in texts]


@given(
    rows=st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    wide=st.booleans(),
    binary=st.booleans(),
)
def test_token_ids_without_what_their_mask_leaves_out(
    rows: list[list[int]], wide: bool, binary: bool
) -> None:
    kind, dtype = ("INT64", np.int64) if wide else ("INT32", np.int32)
    ids = np.array(rows, dtype=dtype)
    mask = (ids % 2).astype(dtype)
    body, length = written(("input_ids", ids, kind), ("attention_mask", mask, kind), binary=binary)
    tensors = parse_inference(body, length, LIMITS).tensors
    assert token_ids(tensors["input_ids"], None, 8) == rows
    kept = [[one for one in row if one % 2] for row in rows]
    assert token_ids(tensors["input_ids"], tensors["attention_mask"], 8) == kept


@pytest.mark.parametrize("binary", [True, False])
def test_pixels(binary: bool) -> None:
    seen = np.random.default_rng(1).standard_normal((2, 3, 4, 5)).astype(np.float32)
    body, length = written(("pixel_values", seen, "FP32"), binary=binary)
    found = pixel_array(parse_inference(body, length, LIMITS).tensors["pixel_values"], 2)
    assert found.shape == seen.shape
    assert np.array_equal(np.frombuffer(found.data, np.float32).reshape(seen.shape), seen)
    with pytest.raises(ApiError, match="n at most 1"):
        pixel_array(parse_inference(body, length, LIMITS).tensors["pixel_values"], 1)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("rows", [1, 40])
async def test_the_official_client_reads_a_response(rows: int, binary: bool) -> None:
    vectors = [array("f", [index, 0.1, -1e30]) for index in range(rows)]
    response = InferResponse(model_name="embed", model_version="2", id="mine", outputs=())
    body, length = await encode_response(response, "embeddings", vectors, binary=binary)
    assert (length is not None) == binary
    result = triton.InferenceServerClient.parse_response_body(body, header_length=length)
    assert result.as_numpy("embeddings").tolist() == [vector.tolist() for vector in vectors]
    assert result.get_response()["model_version"] == "2"


@given(body=st.binary(max_size=40), length=st.none() | st.integers(0, 50))
def test_any_other_body_is_refused(body: bytes, length: int | None) -> None:
    with pytest.raises(ApiError):
        parse_inference(body, None if length is None else b"%d" % length, LIMITS)
