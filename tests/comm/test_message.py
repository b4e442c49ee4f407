"""The wire format: every message is decoded as it was encoded, and bytes that are not a message are refused."""

import json
import struct
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.comm import message as wire
from ranvier.comm.message import Message, MessageKind, decode, encode, encode_head, encoded_bytes, pack, read_head
from tests.covering import examples
from tests.errors import raises

DTYPES = list(wire._DTYPES.values())


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
    return tensor.transpose(0, -1) if tensor.dim() > 1 and draw(st.booleans()) else tensor


@st.composite
def messages(draw):
    named = draw(st.dictionaries(st.text(max_size=8), tensors(), max_size=5))
    wanted = frozenset(name for name in named if draw(st.booleans()))
    numbers = st.integers(-2**31, 2**31 - 1)
    return Message(draw(st.sampled_from(MessageKind)), draw(numbers), draw(numbers), named, wanted)


def check(actual: Message, sent: Message) -> None:
    assert (actual.kind, actual.step, actual.microbatch, actual.requires_grad) == (
        sent.kind, sent.step, sent.microbatch, sent.requires_grad)
    assert list(actual.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert (actual.tensors[name].dtype, actual.tensors[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(actual.tensors[name], tensor)


@given(messages())
def test_round_trip(sent):
    encoded = encode(sent)
    assert encoded.numel() == encoded_bytes(sent) == read_head(encoded[:wire.PREAMBLE_BYTES]).total
    assert encoded.numel() >= sent.payload_bytes + wire.PREAMBLE_BYTES
    received = decode(encoded, 3)
    assert received.source == 3 and received.sent_ns > 0
    check(received, sent)
    roomy = torch.cat([encoded, torch.zeros(17, dtype=torch.uint8)])
    check(decode(roomy, 3), sent)
    for tensor in received.tensors.values():
        assert tensor.numel() == 0 or (tensor.data_ptr() - encoded.data_ptr()) % 64 == 0


def test_a_buffer_that_begins_at_an_odd_place_is_refused():
    """Its tensors would be read from the bytes next to their own."""
    encoded = encode(Message(MessageKind.FORWARD, 0, 0, {"x": torch.ones(3)}))
    with pytest.raises(ValueError, match="not a place for a tensor"):
        decode(torch.cat([torch.zeros(3, dtype=torch.uint8), encoded])[3:], 0)


@given(messages())
def test_head_and_tensors_may_travel_apart(sent):
    head, packed = encode_head(sent), pack(sent, torch.device("cpu"))
    assert read_head(head).total == packed.numel() == encoded_bytes(sent)
    check(decode(head, 1, packed), sent)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(raw):
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    for read in (read_head, lambda tensor: decode(tensor, 0)):
        with pytest.raises(ValueError, match=r"message"):
            read(data)


@examples(120)
@given(messages(), st.data())
def test_damaged_messages_never_do_worse_than_a_value_error(sent, data):
    raw = bytearray(encode(sent).numpy().tobytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[:data.draw(st.integers(1, len(raw)))]
    try:
        received = decode(torch.frombuffer(raw, dtype=torch.uint8), 0)
    except ValueError:
        return
    for tensor in received.tensors.values():
        tensor.clone()


@examples(120)
@given(messages(), st.data())
def test_a_flipped_bit_of_the_head_is_noticed(sent, data):
    head = bytearray(encode_head(sent).numpy().tobytes())
    place, bit = data.draw(st.integers(0, len(head) - 1)), data.draw(st.integers(0, 7))
    raw = bytearray(encode(sent).numpy().tobytes())
    raw[place] ^= 1 << bit
    damaged = torch.frombuffer(raw, dtype=torch.uint8)
    with pytest.raises(ValueError, match="message"):
        decode(damaged, 0)
    if place < wire.PREAMBLE_BYTES:
        with pytest.raises(ValueError, match="message"):
            read_head(damaged)


def forged(description: object, total: int | None = None, kind: int = 1, length: int | None = None) -> torch.Tensor:
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    size = wire.PREAMBLE_BYTES + len(text) + 256
    head = struct.pack("<4sBiiiqqII", b"RNV1", kind, 0, 0, 0, 0, size if total is None else total,
                       len(text) if length is None else length, zlib.crc32(text))
    head += struct.pack("<I", zlib.crc32(head))
    return torch.frombuffer(bytearray(head + text + bytes(256)), dtype=torch.uint8)


@pytest.mark.parametrize("description", [
    b"\xff\xfe", b"[", b"3", b"null", b"[1]", b'[["a"]]', b"[" * 100_000, [["a", "float99", [1], False]],
    [["a", "float32", [-1], False]], [["a", "float32", ["1"], False]], [["a", "float32", [True], False]],
    [["a", "float32", [2], 1]], [["a", ["float32"], [2], False]], [[None, "float32", [2], False]],
    [["a", "float32", 7, False]], [["a", "float32", [1], False], ["a", "float32", [1], False]],
    [["a", "float32", [2**62, 2**62], False]], [["a", "float32", [0, 2**80], False]],
], ids=lambda value: str(value)[:30])
def test_forged_descriptions_are_refused(description):
    with pytest.raises(ValueError, match=r"message"):
        decode(forged(description), 0)


def test_a_huge_empty_shape_of_the_right_size_is_refused():
    fields = (("a", "float32", (0, 2**80), False),)
    text, _, total = wire._describe(fields)
    with pytest.raises(ValueError, match="does not fit its bytes"):
        decode(forged(text, total=total), 0)


def test_forged_heads_are_refused():
    text, _, total = wire._describe(())
    assert decode(forged(text, total=total), 0).tensors == {}
    for wrong in (dict(total=total - 1), dict(total=2**40), dict(total=-1), dict(total=total, kind=99),
                  dict(total=2**62, length=2**32 - 1)):
        with pytest.raises(ValueError, match=r"message|MessageKind"):
            decode(forged(text, **wrong), 0)


def test_a_dtype_that_cannot_travel_is_named():
    with raises("message-dtype", 7, "torch.complex32", "float64"):
        encode(Message(MessageKind.FORWARD, 0, 7, {"x": torch.empty(1, dtype=torch.complex32)}))
