"""Laws of the layers: they equal their formulas, caches and packing change nothing, one seed rules a forward pass.

All of it is float64 in evaluation mode unless a test says otherwise. Encodings come with parameters that are far from neutral,
and with tables that end inside the sequence, so that a position that is off by one shows.
"""

import io
import itertools
import re
from copy import deepcopy
from functools import reduce
from itertools import pairwise
from operator import add

import pytest
import torch
from oracle import make_encoding
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lagwise
from lagwise import Encoding, Terms, noise
from lagwise.encodings import options_of
from lagwise.lens import attention_parts
from lagwise.nn import Cache, Decoder, Encoder, Layer, RelativeAttention, Stack
from lagwise.nn.stacks import layer_seeds

DIM, HEADS, LAYERS, TIME = 32, 4, 2, 11

ABSOLUTE = [name for name, kind in lagwise.ENCODINGS.items() if kind.absolute]
STOCHASTIC = ["sine-spe", "conv-spe"]
# Those that linear attention can use.
LINEAR = [name for name in lagwise.ENCODINGS if name not in ("shaw", "huang1", "huang2", "huang3", "huang4", "xl", "xpos")]
WITH_CAUSAL_FORM = [name for name in lagwise.ENCODINGS if "causal" in options_of(name)]

# A transform alone, beside a table that reads the raw keys, beside one that does not, after another transform, and with `embed`.
SUMS = [
    "rotary + shaw",
    "rotary + xl",
    "rotary + t5",
    "xpos + huang2",
    "rotary + sine-spe",
    "sinusoidal + alibi",
    "t5 + shaw + huang4",
]
SUMS_WITH_SPE = ["sine-spe + shaw", "conv-spe + huang4", "sine-spe + t5"]


def make(names: str, **options) -> Encoding:
    """Makes an encoding, or a sum of several that are joined by " + "."""
    return reduce(add, (make_encoding(name, **options) for name in names.split(" + ")))


def stack(kind: type[Stack], encoding: Encoding | str | list | None, **options) -> Stack:
    """Makes a stack on the path of long sequences: "auto" would take the specification for ones as short as these."""
    options = {"layers": LAYERS, "impl": "blockwise", **options}
    return kind(DIM, heads=HEADS, encoding=encoding, **options).double().eval()


def tokens(batch: int = 2, time: int = TIME) -> Tensor:
    return torch.randn(batch, time, DIM, dtype=torch.float64)


def spread(module: torch.nn.Module) -> torch.nn.Module:
    """Moves all parameters away from their first values: those of T5 and of norms are neutral."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return module


def with_weights_of(source: Stack, target: Stack) -> Stack:
    """Copies all weights but those of encodings."""
    weights = {name: weight for name, weight in source.state_dict().items() if "encoding." not in name}
    target.load_state_dict(weights, strict=False)
    return target


def size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def assert_different(actual: Tensor, other: Tensor) -> None:
    assert float((actual - other).detach().abs().max()) > 1e-6


def written_out(layer: RelativeAttention, x: Tensor, context: Tensor | None = None, **options) -> Tensor:
    """Projects, calls the specification, projects back."""
    source = x if context is None else context

    def heads(linear: torch.nn.Linear, y: Tensor) -> Tensor:
        weight, offset = linear.weight.view(-1, layer.head_dim, DIM), linear.bias.view(-1, layer.head_dim)
        return torch.einsum("btc,hdc->bhtd", y, weight) + offset[:, None]

    out = lagwise.attention(
        heads(layer.q, x), heads(layer.k, source), heads(layer.v, source), layer.encoding, impl="dense", **options
    )
    back = layer.out.weight.view(DIM, HEADS, layer.head_dim)
    return torch.einsum("bhtd,chd->btc", out, back) + layer.out.bias


@pytest.mark.parametrize("keys", [None, 7, 15])
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"kv_heads": 1, "head_dim": 6}], ids=str)
def test_attention_equals_its_formula(relative_name, options, keys):
    encoding = make(relative_name, head_dim=options.get("head_dim", DIM // HEADS))
    layer = RelativeAttention(DIM, heads=HEADS, encoding=encoding, impl="blockwise", **options).double().eval()
    x, context, seed = tokens(), None if keys is None else tokens(time=keys), torch.tensor(5)
    assert_same(layer(x, context, seed=seed), written_out(layer, x, context, seed=seed))


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 1)}, {"scale": 1.0}], ids=str)
def test_attention_hands_its_options_on(options):
    layer = RelativeAttention(DIM, heads=HEADS, encoding=make("xl"), **options).double().eval()
    x = tokens()
    assert_same(layer(x), written_out(layer, x, **options))
    assert_different(layer(x), written_out(layer, x))


@pytest.mark.parametrize("impl", ["auto", "dense", "blockwise", "split"])
def test_every_implementation_does_a_layer(impl):
    layer = RelativeAttention(DIM, heads=HEADS, encoding=make("shaw"), impl=impl).double().eval()
    x = tokens()
    assert_same(layer(x), written_out(layer, x))


def test_attention_without_offsets():
    layer = RelativeAttention(DIM, heads=HEADS, bias=False)
    assert {name for name, _ in layer.named_parameters()} == {"q.weight", "k.weight", "v.weight", "out.weight"}


def test_given_terms_take_the_place_of_the_layers_own():
    layer = RelativeAttention(DIM, heads=HEADS, encoding=make("t5")).double().eval()
    x, other = tokens(), make("shaw").double()
    given = layer(x, terms=other.terms(1 - TIME, TIME - 1, scale=layer.scale))
    layer.encoding = other
    assert_same(given, layer(x))


def test_a_layer_normalises_before_or_after_each_part():
    x, context = tokens(), tokens(time=7)
    pre, post = (spread(Layer(DIM, heads=HEADS, cross=True, encoding=make("t5"), norm=norm)).double() for norm in ("pre", "post"))

    y = x + pre.attention(pre.attention_norm(x))
    y = y + pre.cross(pre.cross_norm(y), context)
    assert_same(pre(x, context), y + pre.feed(pre.feed_norm(y)))

    y = post.attention_norm(x + post.attention(x))
    y = post.cross_norm(y + post.cross(y, context))
    assert_same(post(x, context), post.feed_norm(y + post.feed(y)))


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_stack_is_its_layers_in_a_row(norm):
    encoder = spread(stack(Encoder, [make("t5"), make("rotary")], norm=norm))
    x = tokens()
    y = encoder.layers[1](encoder.layers[0](x))
    # After the last layer of a pre-norm stack nothing else normalises the sum of all parts.
    assert_same(encoder(x), encoder.norm(y) if norm == "pre" else y)
    assert (size(encoder.norm) > 0) == (norm == "pre")


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_a_name_makes_the_same_stack_as_an_encoding(softmax_name, kind, norm):
    causal = {"causal": True} if kind is Decoder and softmax_name in WITH_CAUSAL_FORM else {}
    by_name = spread(stack(kind, softmax_name, norm=norm))
    encoding = lagwise.make(softmax_name, heads=HEADS, head_dim=DIM // HEADS, dim=DIM, **causal)
    by_object = stack(kind, encoding, norm=norm)
    by_object.load_state_dict(by_name.state_dict())
    x = tokens()
    assert_same(by_object(x), by_name(x))


def test_a_shared_encoding_is_there_once_and_others_once_per_layer(relative_name):
    rest = size(stack(Encoder, None, layers=3))
    encoding = size(lagwise.make(relative_name, heads=HEADS, head_dim=DIM // HEADS, dim=DIM))
    assert size(stack(Encoder, relative_name, layers=3)) == rest + encoding
    assert size(stack(Encoder, relative_name, layers=3, per_layer=True)) == rest + 3 * encoding


def test_a_list_gives_each_layer_its_own_encoding():
    given = [make("t5"), make("shaw"), make("rotary")]
    encoder = stack(Encoder, given, layers=3)
    assert [layer.attention.encoding for layer in encoder.layers] == given
    assert size(encoder) == size(stack(Encoder, None, layers=3)) + sum(size(encoding) for encoding in given)
    with pytest.raises(ValueError, match=r"encoding must be one, or one for each of 2 layers, but 3 were given"):
        stack(Encoder, given)


def test_one_encoding_for_all_layers_equals_the_same_one_in_each(relative_name):
    if relative_name in STOCHASTIC:
        pytest.skip("layers with an encoding of their own draw their own codes")
    encoding, x = make(relative_name), tokens()
    shared = stack(Encoder, encoding)
    own = with_weights_of(shared, stack(Encoder, [encoding] * LAYERS))
    assert_same(own(x), shared(x))


@pytest.mark.parametrize("names", [*ABSOLUTE, "sinusoidal + t5", "rotary + learned"])
def test_absolute_encodings_act_once_on_the_input(names):
    encoding, x = make(names), tokens()
    parts = [encoding.left, encoding.right] if " + " in names else [encoding]
    relative = [part for part in parts if not part.absolute]
    encoder = stack(Encoder, encoding)
    plain = with_weights_of(encoder, stack(Encoder, relative[0] if relative else None))
    assert_same(encoder(x), plain(encoding.embed(x, torch.arange(TIME))))
    assert_different(encoder(x), plain(x))


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("name", WITH_CAUSAL_FORM)
def test_names_take_the_causal_form_in_causal_stacks(name, per_layer):
    def forms(model: torch.nn.Module) -> set[bool]:
        return {module.causal for module in model.modules() if isinstance(module, lagwise.ENCODINGS[name])}

    assert forms(stack(Decoder, name, per_layer=per_layer)) == {True}
    assert forms(stack(Encoder, name, per_layer=per_layer, causal=True)) == {True}
    assert forms(stack(Encoder, name, per_layer=per_layer)) == {False}
    assert forms(RelativeAttention(DIM, heads=HEADS, encoding=name, causal=True)) == {True}


def test_a_causal_encoder_equals_a_decoder(softmax_name):
    encoding = make(softmax_name)
    encoder, decoder = stack(Encoder, encoding, causal=True), stack(Decoder, encoding)
    decoder.load_state_dict(encoder.state_dict())
    x = tokens()
    assert_same(decoder(x), encoder(x))


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"norm": "post"}, {"cross": True}], ids=str)
def test_the_future_does_not_leak(softmax_name, options):
    decoder = stack(Decoder, make(softmax_name), **options)
    context = [tokens(time=5)] if "cross" in options else []
    x, seen = tokens(), 5
    changed = torch.cat([x[:, :seen], 100.0 * tokens(time=TIME - seen)], dim=1)
    assert_same(decoder(changed, *context)[:, :seen], decoder(x, *context)[:, :seen])
    # The same comparison must be able to fail.
    assert_different(decoder(changed, *context)[:, seen], decoder(x, *context)[:, seen])


def in_chunks(decoder: Decoder, x: Tensor, chunks: list[int], *context: Tensor, **options) -> Tensor:
    """Decodes through a cache; masks of keys are cut to the keys that are there."""
    cache, parts = decoder.new_cache(), []
    for part in x.split(chunks, dim=1):
        there = cache.length + part.shape[1]
        cut = dict(options)
        if "key_mask" in options:
            cut["key_mask"] = options["key_mask"][:, :there]
        if "lengths" in options:
            cut["lengths"] = options["lengths"].clamp(max=there)
        parts.append(decoder(part, *context, cache=cache, **cut))
        assert cache.length == there
    return torch.cat(parts, dim=1)


CHUNKS = [[1] * TIME, [4, 1, 6], [TIME]]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
def test_decoding_equals_one_pass(softmax_name, chunks, kv_heads):
    decoder, x = stack(Decoder, make(softmax_name), kv_heads=kv_heads), tokens()
    assert_same(in_chunks(decoder, x, chunks), decoder(x))


@pytest.mark.parametrize("name", WITH_CAUSAL_FORM)
def test_decoding_with_tables_of_the_past_alone(name):
    decoder, x = stack(Decoder, make(name, causal=True)), tokens()
    assert_same(in_chunks(decoder, x, [4, 1, 6]), decoder(x))


@pytest.mark.parametrize("names", [*SUMS, *SUMS_WITH_SPE])
def test_decoding_with_sums_of_encodings(names):
    decoder, x = stack(Decoder, make(names)), tokens()
    for chunks in CHUNKS:
        assert_same(in_chunks(decoder, x, chunks), decoder(x))


@pytest.mark.parametrize("names", [*SUMS, "sine-spe + t5"])
def test_decoding_with_sums_of_encodings_and_grouped_heads(names):
    decoder, x = stack(Decoder, make(names), kv_heads=2), tokens()
    for chunks in CHUNKS:
        assert_same(in_chunks(decoder, x, chunks), decoder(x))


@pytest.mark.parametrize(
    "options",
    [
        {"norm": "post"},
        {"window": (3, 0)},
        {"scale": 1.0},
        {"head_dim": 8, "bias": False},
        {"impl": "auto"},
        {"impl": "dense"},
        {"impl": "split"},
    ],
    ids=str,
)
@pytest.mark.parametrize("names", ["xl", "rotary + shaw", "conv-spe"])
def test_decoding_with_options(names, options):
    decoder, x = stack(Decoder, make(names), **options), tokens()
    assert_same(in_chunks(decoder, x, [4, 1, 6]), decoder(x))


def test_decoding_with_an_encoding_for_each_layer(relative_name):
    decoder, x = stack(Decoder, [make(relative_name), make(relative_name)]), tokens()
    assert_same(in_chunks(decoder, x, [4, 1, 6]), decoder(x))


padded = pytest.mark.parametrize(
    "masks",
    [
        {"key_mask": torch.arange(TIME) >= torch.tensor([[0], [3]])},
        {"lengths": torch.tensor([TIME, 4])},
        {"key_mask": torch.arange(TIME) >= torch.tensor([[2], [0]]), "lengths": torch.tensor([TIME, 4])},
    ],
    ids=["left", "right", "both"],
)


@padded
@pytest.mark.parametrize("names", ["t5", "learned", "rotary + shaw", "sine-spe"])
def test_decoding_with_padded_keys(names, masks):
    decoder, x = stack(Decoder, make(names)), tokens()
    assert_same(in_chunks(decoder, x, [5, 1, 5], **masks), decoder(x, **masks))
    assert_different(decoder(x)[1], decoder(x, **masks)[1])


def test_decoding_with_a_context_projects_it_once(softmax_name):
    decoder, x, context = stack(Decoder, make(softmax_name), cross=True, kv_heads=2), tokens(), tokens(time=7)
    lengths = torch.tensor([7, 4])
    expected = decoder(x, context, context_lengths=lengths)
    calls = []
    for layer in decoder.layers:
        for linear in (layer.cross.k, layer.cross.v):
            linear.register_forward_hook(lambda linear, _, out: calls.append(linear))
    assert_same(in_chunks(decoder, x, [4, 1, 6], context, context_lengths=lengths), expected)
    assert len(calls) == len(set(calls)) == 2 * LAYERS


def test_masks_of_the_context():
    decoder, x, context = stack(Decoder, make("shaw"), cross=True), tokens(), tokens(time=7)
    alone = torch.cat([decoder(x[:1], context[:1, 2:]), decoder(x[1:], context[1:, :4])])
    mask, lengths = torch.arange(7) >= torch.tensor([[2], [0]]), torch.tensor([7, 4])
    both = mask & (torch.arange(7) < lengths[:, None])
    for masks in ({"context_mask": both}, {"context_mask": mask, "context_lengths": lengths}):
        assert_same(decoder(x, context, **masks), alone)
        assert_same(in_chunks(decoder, x, [4, 7], context, **masks), alone)


class Watched(Encoding):
    """A rotation that notes at which positions it is asked to turn keys."""

    def __init__(self):
        super().__init__()
        self.rotary, self.positions = lagwise.Rotary(head_dim=DIM // HEADS), []

    def terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        turn = self.rotary.terms(first, last, scale=scale).transform

        def transform(q, k, q_positions, k_positions):
            self.positions += k_positions.tolist()
            return turn(q, k, q_positions, k_positions)

        return Terms(transform=transform)


@pytest.mark.parametrize("beside", [None, "t5", "shaw", "huang4"])
def test_keys_are_transformed_once(beside):
    watched = Watched()
    decoder = stack(Decoder, watched if beside is None else watched + make(beside))
    x = tokens()
    in_chunks(decoder, x, [4, 1, 6])
    assert sorted(watched.positions) == sorted(LAYERS * list(range(TIME)))


def test_raw_keys_are_kept_only_where_a_table_reads_them_beside_a_transform():
    for names, kept in (
        ("rotary", False),
        ("shaw", False),
        ("rotary + t5", False),
        ("rotary + shaw", True),
        ("rotary + xl", True),
    ):
        cache = Cache()
        RelativeAttention(DIM, heads=HEADS, encoding=make(names), causal=True).eval().double()(tokens(), cache=cache)
        assert (cache.raw_k is not None) == kept, names


@pytest.mark.parametrize("names", ["t5", "rotary", "rotary + shaw", "rotary + xl", "sine-spe", "learned"])
def test_select_reorders_the_rows_of_a_cache(names):
    decoder, x, context = stack(Decoder, make(names), cross=True), tokens(batch=3), tokens(batch=3, time=5)
    cache, rows = decoder.new_cache(), torch.tensor([2, 0, 0, 1])
    decoder(x[:, :6], context, cache=cache)
    cache.select(rows)
    after = tokens(batch=4, time=3)
    # As beams do, the rows go on in different ways; the context comes from the cache, so that here any will do.
    out = decoder(after, torch.zeros(4, 5, DIM, dtype=torch.float64), cache=cache)
    expected = decoder(torch.cat([x[rows, :6], after], dim=1), context[rows])
    assert_same(out, expected[:, 6:])


def test_select_of_one_cache():
    layer = RelativeAttention(DIM, heads=HEADS, encoding=make("rotary + shaw"), causal=True).double().eval()
    x, cache, rows = tokens(batch=3), Cache(), torch.tensor([1, 0])
    layer(x, cache=cache)
    expected = [kept[rows] for kept in (cache.k, cache.v, cache.raw_k)]
    cache.select(rows)
    for kept, row in zip((cache.k, cache.v, cache.raw_k), expected, strict=True):
        assert torch.equal(kept, row)
    empty = Cache()
    empty.select(rows)
    assert empty.length == 0


def garbage_outside(x: Tensor, mask: Tensor) -> Tensor:
    """Fills padding with numbers that nobody overlooks."""
    return torch.where(mask[..., None], x, 1e3 * torch.randn_like(x))


def test_padding_on_the_right_changes_nothing(softmax_name):
    encoder, lengths = stack(Encoder, make(softmax_name)), torch.tensor([TIME, 4, 1])
    mask = torch.arange(TIME) < lengths[:, None]
    x = garbage_outside(tokens(batch=3), mask)
    by_lengths, by_mask = encoder(x, lengths=lengths), encoder(x, key_mask=mask)
    for row, length in enumerate(lengths.tolist()):
        alone = encoder(x[row : row + 1, :length])
        assert_same(by_lengths[row : row + 1, :length], alone)
        assert_same(by_mask[row : row + 1, :length], alone)


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_padding_on_the_left_changes_nothing(relative_name, kind):
    if relative_name in STOCHASTIC:
        pytest.skip("codes belong to absolute positions: a shifted sequence meets others, with the same mean")
    model, lengths = stack(kind, make(relative_name)), torch.tensor([TIME, 4, 1])
    mask = torch.arange(TIME) >= TIME - lengths[:, None]
    x = garbage_outside(tokens(batch=3), mask)
    out = model(x, key_mask=mask)
    for row, length in enumerate(lengths.tolist()):
        assert_same(out[row : row + 1, TIME - length :], model(x[row : row + 1, TIME - length :]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_packing_changes_nothing(softmax_name, kind, dtype):
    model, x = stack(kind, make(softmax_name)), tokens(batch=1)
    # One of the sequences is empty.
    ends = [0, 1, 5, 5, TIME]
    out = model(x, cu_seqlens=torch.tensor(ends, dtype=dtype))
    alone = [model(x[:, start:stop]) for start, stop in pairwise(ends) if stop > start]
    assert_same(out, torch.cat(alone, dim=1))
    assert_same(model(x, cu_seqlens=torch.tensor(ends, dtype=dtype), max_seqlen=TIME - 5), out)


def test_tables_cover_the_longest_packed_sequence_alone():
    class Spy(lagwise.XL):
        def terms(self, first, last, **options):
            asked.append((first, last))
            return super().terms(first, last, **options)

    asked: list[tuple[int, int]] = []
    encodings = [Spy(heads=HEADS, head_dim=DIM // HEADS) for _ in range(2)]
    for given in (encodings[0], encodings):
        model = stack(Encoder, given)
        model(tokens(batch=1), cu_seqlens=torch.tensor([0, 4, TIME]), max_seqlen=TIME - 4)
    assert set(asked) == {(5 - TIME, TIME - 5)} and len(asked) == 3
    q = torch.randn(1, HEADS, TIME, DIM // HEADS)
    lagwise.attention(q, q, q, encodings[0], cu_seqlens=torch.tensor([0, 4, TIME]), max_seqlen=TIME - 4, causal=True)
    assert asked[-1] == (5 - TIME, 0)


def test_autocast_leaves_the_tables_of_layers_alone():
    layer, seed = RelativeAttention(DIM, heads=HEADS, encoding="xl"), torch.tensor(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = layer.terms_of(layer.encoding, -3, 3, seed)
    assert {table.values.dtype for table in terms.tables().values()} == {torch.float32}


# Stacks that draw in training, each in its own way.
RANDOM = {
    "attention dropout": lambda **options: stack(Encoder, make("t5"), attention_dropout=0.5, **options),
    "decoder": lambda **options: stack(Decoder, make("rotary"), attention_dropout=0.5, **options),
    "at5 dropout": lambda **options: stack(Encoder, make("at5", dropout=0.5), **options),
    "codes": lambda **options: stack(Encoder, make("sine-spe"), **options),
    "one per layer": lambda **options: stack(Encoder, [make("conv-spe"), make("at5-free", dropout=0.5)], **options),
    "all dropouts": lambda **options: stack(Encoder, make("conv-spe"), attention_dropout=0.2, dropout=0.2, **options),
}


@pytest.mark.parametrize("name", RANDOM)
def test_training_draws_afresh_and_evaluation_does_not(name):
    model, x = RANDOM[name](), tokens()
    assert torch.equal(model(x), model(x))
    evaluated = model(x)
    model.train()
    torch.manual_seed(1)
    first = model(x)
    assert_different(model(x), first)
    torch.manual_seed(1)
    assert torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), evaluated)


def test_evaluation_drops_nothing_and_leaves_the_generator_alone():
    encoding, x = make("sine-spe"), tokens()
    model = stack(Encoder, encoding, attention_dropout=0.5, dropout=0.5)
    plain = with_weights_of(model, stack(Encoder, encoding))
    state = torch.get_rng_state()
    assert_same(model(x), plain(x))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_given_seed_decides_everything():
    layer = Layer(DIM, heads=HEADS, encoding=make("sine-spe"), cross=True, attention_dropout=0.5).double().train()
    x, context = tokens(), tokens(time=7)
    first, state = layer(x, context, seed=torch.tensor(1)), torch.get_rng_state()
    assert torch.equal(layer(x, context, seed=torch.tensor(1)), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert_different(layer(x, context, seed=torch.tensor(2)), first)


def attention_outputs(model: Stack, x: Tensor, *context: Tensor) -> list[Tensor]:
    """Returns what each attention of the stack makes of one input, if all of them have the weights of the first."""
    found, same, modules = [], tokens(), [m for m in model.modules() if isinstance(m, RelativeAttention)]
    weights = {name: value for name, value in modules[0].state_dict().items() if not name.startswith("encoding.")}
    for module in modules:
        module.load_state_dict(weights, strict=False)
        module.register_forward_pre_hook(lambda _, given: (same, *(same for _ in given[1:])))
        module.register_forward_hook(lambda _, __, out: found.append(out))
    model(x, *context)
    return found


def test_layers_use_different_dropout_masks():
    model = stack(Decoder, None, attention_dropout=0.5, cross=True, layers=3)
    # Without causality self- and cross-attention compute the same, up to the mask.
    for layer in model.layers:
        layer.attention.causal = False
    outs = attention_outputs(model.train(), tokens(), tokens())
    assert len(outs) == 6
    for number, out in enumerate(outs):
        for other in outs[:number]:
            assert_different(out, other)


def test_seeds_of_layers_count_the_layers_and_are_aligned():
    seed = torch.tensor(5)
    seeds = layer_seeds(seed, 5)
    assert [int(x) for x in seeds] == [int(noise.bits(seed, noise.Stream.LAYER, number)) for number in range(5)]
    assert all(x.shape == () and x.data_ptr() % 16 == 0 for x in seeds)


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_share_an_encoding_share_its_random_numbers(training):
    shared = attention_outputs(stack(Encoder, make("sine-spe")).train(training), tokens())
    assert_same(shared[1], shared[0])
    encoding = make("sine-spe")
    own = attention_outputs(stack(Encoder, [encoding, deepcopy(encoding)]).train(training), tokens())
    assert_different(own[1], own[0])


CHECKPOINTED = ["dense", "blockwise"]


@pytest.mark.parametrize("impl", CHECKPOINTED)
@pytest.mark.parametrize("name", RANDOM)
def test_checkpointing_repeats_the_random_numbers(name, impl):
    model, x = RANDOM[name](impl=impl).train(), tokens()

    def gradients(forward) -> list[Tensor]:
        torch.manual_seed(3)
        loss = forward(x).square().sum()
        # What is drawn between the two passes must not matter to the recomputation.
        torch.randn(7)
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        return [gradient for gradient in found if gradient is not None]

    plain = gradients(model)
    assert plain
    for a, b in zip(plain, gradients(lambda x: checkpoint(model, x, use_reentrant=False)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("impl", CHECKPOINTED)
def test_checkpointing_of_single_layers(impl):
    options = {"heads": HEADS, "attention_dropout": 0.3, "impl": impl}
    layers = torch.nn.ModuleList(Layer(DIM, encoding=make("sine-spe"), **options) for _ in range(2)).double()
    x = tokens()

    def gradients(call) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        return torch.autograd.grad(call(layers[1], call(layers[0], x)).square().sum(), list(layers.parameters()))

    plain = gradients(lambda layer, y: layer(y))
    for a, b in zip(plain, gradients(lambda layer, y: checkpoint(layer, y, use_reentrant=False)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_gradients_reach_every_parameter_of_the_encoding(softmax_name, kind):
    model = stack(kind, make(softmax_name))
    (model(tokens()) * tokens()).sum().backward()
    # The last offset of one MLP for all visible lags is added to all logits of a row, which softmax does not see.
    one_mlp = softmax_name == "at5-free" or (softmax_name == "at5" and kind is Decoder)
    for name, parameter in model.encoding.named_parameters():
        largest = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        assert (largest < 1e-12) if one_mlp and name == "readout.offset3" else (largest > 1e-7), name


def test_parameters_come_back_from_a_file(softmax_name):
    saved, fresh = (spread(Encoder(DIM, layers=LAYERS, heads=HEADS, encoding=softmax_name)).eval() for _ in range(2))
    x = tokens().float()
    assert_different(saved(x), fresh(x))
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x), saved(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_stacks_move_to_another_dtype(softmax_name, kind, dtype):
    model, x = stack(kind, make(softmax_name)).to(dtype), tokens().to(dtype)
    out = model(x)
    assert out.dtype == dtype
    # All of it, back in float64, is the same function of the same numbers: outputs are of size one and round in a few places.
    exact = model.double()(x.double())
    assert exact.dtype == torch.float64
    assert float((out.double() - exact).detach().abs().max()) <= 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("names", ["sine-spe + shaw", "conv-spe + huang4", "sine-spe + xl"])
def test_decoding_with_codes_beside_raw_keys_and_grouped_heads(names):
    decoder, x = stack(Decoder, make(names), kv_heads=2), tokens()
    for chunks in CHUNKS:
        assert_same(in_chunks(decoder, x, chunks), decoder(x))


def test_a_window_does_not_cut_the_context():
    decoder, x, context = stack(Decoder, make("t5"), window=(2, 0), cross=True), tokens(), tokens(time=7)
    assert_same(in_chunks(decoder, x, [4, 1, 6], context), decoder(x, context))
    # Every token sees all of the context.
    for t in range(7):
        changed = context.clone()
        changed[:, t] += 1.0
        assert ((decoder(x, changed) - decoder(x, context)).abs().amax(-1) > 1e-9).all()


def test_a_refused_call_leaves_the_cache_alone():
    decoder = stack(Decoder, make("t5"), cross=True)
    cache = decoder.new_cache()
    with pytest.raises(ValueError, match="context must be given"):
        decoder(tokens(), cache=cache)
    assert cache.length == 0


# Linear attention


LINEAR_SUMS = ["rotary + t5", "sinusoidal + alibi", "sine-spe + t5-free", "permute + at5"]


def linear_stack(kind: type[Stack], encoding: Encoding | str | list | None, **options) -> Stack:
    return stack(kind, encoding, **{"attention": "linear", "impl": "auto", **options})


def linear_written_out(layer: RelativeAttention, x: Tensor, context: Tensor | None = None, **options) -> Tensor:
    """Projects, calls linear attention with all pairs written out, projects back."""
    source = x if context is None else context
    q, k, v = (
        linear(y).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for linear, y in ((layer.q, x), (layer.k, source), (layer.v, source))
    )
    options = {"feature_map": layer.feature_map, "impl": "dense", **options}
    return layer.out(lagwise.linear_attention(q, k, v, layer.encoding, **options).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("feature_map", ["favor", "relu", "elu"])
@pytest.mark.parametrize("names", [*LINEAR, "rotary + t5"])
def test_linear_attention_equals_its_formula(names, feature_map):
    if lagwise.ENCODINGS.get(names, lagwise.NoEncoding).absolute:
        pytest.skip("acts on the input of a stack")
    options = {"heads": HEADS, "kv_heads": 2, "attention": "linear", "feature_map": feature_map}
    for causal in (False, True):
        layer = RelativeAttention(DIM, encoding=make(names), causal=causal, **options).double().eval()
        x, seed = tokens(), torch.tensor(5)
        assert_same(layer(x, seed=seed), linear_written_out(layer, x, causal=causal, seed=seed))
    layer = RelativeAttention(DIM, **options).double().eval()
    context = tokens(time=7)
    assert_same(layer(x, context), linear_written_out(layer, x, context))


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("linear_name", LINEAR)
def test_linear_stacks_by_name_and_by_object(linear_name, kind, per_layer):
    if per_layer and lagwise.ENCODINGS[linear_name].absolute:
        pytest.skip("acts on the input of a stack, once")
    causal = {"causal": True} if kind is Decoder and linear_name in WITH_CAUSAL_FORM else {}
    by_name = spread(linear_stack(kind, linear_name, per_layer=per_layer))
    made = [lagwise.make(linear_name, heads=HEADS, head_dim=DIM // HEADS, dim=DIM, **causal) for _ in range(LAYERS)]
    by_object = linear_stack(kind, made if per_layer else made[0])
    x = tokens()
    assert_different(by_object(x), by_name(x))
    by_object.load_state_dict(by_name.state_dict())
    assert_same(by_object(x), by_name(x))
    assert_different(linear_stack(kind, linear_name, feature_map="relu")(x), by_name(x))


@pytest.mark.parametrize("names", ["t5", "alibi", "kerple", "rotary", "permute", "rotary + t5"])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
def test_one_encoding_for_all_linear_layers_equals_the_same_one_in_each(names, kind):
    encoding, x = make(names), tokens()
    shared = linear_stack(kind, encoding, feature_map="relu")
    own = with_weights_of(shared, linear_stack(kind, [encoding] * LAYERS, feature_map="relu"))
    assert_same(own(x), shared(x))


@pytest.mark.parametrize("names", [*LINEAR, *LINEAR_SUMS])
def test_linear_decoding_equals_one_pass(names):
    decoder, x = linear_stack(Decoder, make(names), kv_heads=2), tokens()
    for chunks in CHUNKS:
        assert_same(in_chunks(decoder, x, chunks), decoder(x))
    changed = torch.cat([x[:, :5], 100.0 * tokens(time=TIME - 5)], dim=1)
    assert_same(decoder(changed)[:, :5], decoder(x)[:, :5])


@pytest.mark.parametrize("feature_map", ["relu", "elu", "module"])
def test_linear_decoding_with_an_encoding_for_each_layer(feature_map):
    feature_map = lagwise.Favor(DIM // HEADS, features=12) if feature_map == "module" else feature_map
    decoder, x = linear_stack(Decoder, [make("t5"), make("rotary")], feature_map=feature_map, scale=1.0), tokens()
    assert_same(in_chunks(decoder, x, [4, 1, 6]), decoder(x))


@pytest.mark.parametrize("feature_map", ["favor", "relu"])
@pytest.mark.parametrize("names", ["none", "t5", "sine-spe"])
def test_linear_decoding_with_a_context_reads_it_once(names, feature_map):
    options = {"cross": True, "kv_heads": 2, "feature_map": feature_map}
    decoder, x, context = linear_stack(Decoder, make(names), **options), tokens(), tokens(time=7)
    mask, lengths = torch.arange(7) >= torch.tensor([[2], [0]]), torch.tensor([7, 4])
    alone = torch.cat([decoder(x[:1], context[:1, 2:]), decoder(x[1:], context[1:, :4])])
    masks = {"context_mask": mask, "context_lengths": lengths}
    assert_same(decoder(x, context, **masks), alone)
    calls = []
    for layer in decoder.layers:
        for linear in (layer.cross.k, layer.cross.v):
            linear.register_forward_hook(lambda linear, _, out: calls.append(linear))
    assert_same(in_chunks(decoder, x, [4, 1, 6], context, **masks), alone)
    assert len(calls) == len(set(calls)) == 2 * LAYERS


@padded
@pytest.mark.parametrize("names", ["t5", "alibi", "sine-spe"])
def test_linear_decoding_with_padded_keys(names, masks):
    decoder, x = linear_stack(Decoder, make(names)), tokens()
    assert_same(in_chunks(decoder, x, [5, 1, 5], **masks), decoder(x, **masks))
    assert_different(decoder(x)[1], decoder(x, **masks)[1])


@pytest.mark.parametrize("names", ["t5", "alibi", "rotary", "permute", "sine-spe", "learned"])
def test_select_reorders_the_rows_of_a_linear_cache(names):
    decoder, x, context = linear_stack(Decoder, make(names), cross=True), tokens(batch=3), tokens(batch=3, time=5)
    cache, rows, after = decoder.new_cache(), torch.tensor([2, 0, 0, 1]), tokens(batch=4, time=3)
    cache.select(rows)
    assert cache.length == 0
    decoder(x[:, :6], context, cache=cache)
    cache.select(rows)
    out = decoder(after, torch.zeros(4, 5, DIM, dtype=torch.float64), cache=cache)
    assert_same(out, decoder(torch.cat([x[rows, :6], after], dim=1), context[rows])[:, 6:])


def test_a_linear_cache_does_not_grow():
    decoder, sizes = linear_stack(Decoder, make("t5-free"), cross=True), set()
    for time in (20, 40):
        cache = decoder.new_cache()
        for part in (tokens(time=time), tokens(time=1)):
            decoder(part, tokens(time=time), cache=cache)
        states = [cache.state for cache in (*cache.self_attention, *cache.cross_attention)]
        tensors = [x for state in states for x in (state.kv, state.mass, state.top, *state.recent) if x is not None]
        sizes.add(sum(x.untyped_storage().nbytes() for x in tensors))
        assert cache.length == time + 1
    assert len(sizes) == 1


@pytest.mark.parametrize("linear_name", LINEAR)
def test_padding_and_packing_change_nothing_in_linear_stacks(linear_name):
    for kind in (Encoder, Decoder):
        model, lengths = linear_stack(kind, make(linear_name)), torch.tensor([TIME, 4, 1])
        mask = torch.arange(TIME) < lengths[:, None]
        x = garbage_outside(tokens(batch=3), mask)
        by_lengths, by_mask = model(x, lengths=lengths), model(x, key_mask=mask)
        for row, length in enumerate(lengths.tolist()):
            alone = model(x[row : row + 1, :length])
            assert_same(by_lengths[row : row + 1, :length], alone)
            assert_same(by_mask[row : row + 1, :length], alone)
        x, ends = tokens(batch=1), [0, 1, 5, 5, TIME]
        alone = [model(x[:, start:stop]) for start, stop in pairwise(ends) if stop > start]
        assert_same(model(x, cu_seqlens=torch.tensor(ends)), torch.cat(alone, dim=1))
        assert_same(model(x, cu_seqlens=torch.tensor(ends), max_seqlen=TIME), torch.cat(alone, dim=1))


@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("linear_name", LINEAR)
def test_gradients_reach_every_parameter_of_a_linear_stack(linear_name, kind):
    model = linear_stack(kind, make(linear_name))
    (model(tokens()) * tokens()).sum().backward()
    # The last offset of one MLP for all visible lags is a factor of all weights of a row, which cancels.
    one_mlp = linear_name == "at5-free" or (linear_name == "at5" and kind is Decoder)
    for name, parameter in model.named_parameters():
        largest = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
        assert (largest < 1e-12) if one_mlp and name == "encoding.readout.offset3" else (largest > 1e-7), name


def test_every_layer_has_its_own_projection_and_a_module_is_shared():
    decoder = linear_stack(Decoder, make("sine-spe"), cross=True)
    maps = [module for module in decoder.modules() if isinstance(module, lagwise.Favor)]
    # Stochastic encodings make queries as wide as their realizations; the context has no positions.
    assert [tuple(favor.projection.shape) for favor in maps] == [(256, 16), (256, DIM // HEADS)] * LAYERS
    assert_different(maps[0].projection, maps[2].projection)
    favor = lagwise.Favor(DIM // HEADS)
    encoder = linear_stack(Encoder, "t5", feature_map=favor)
    assert {layer.attention.feature_map for layer in encoder.layers} == {favor}
    assert not any(isinstance(module, lagwise.Favor) for module in linear_stack(Encoder, "t5", feature_map="relu").modules())


def test_projections_are_drawn_on_demand_alone():
    encoder, x = linear_stack(Encoder, make("t5")).train(), tokens()
    first, state = encoder(x), deepcopy(encoder.state_dict())
    assert torch.equal(encoder(x), first)
    torch.manual_seed(1)
    encoder.redraw()
    second = encoder(x)
    assert_different(second, first)
    torch.manual_seed(1)
    encoder.redraw()
    assert torch.equal(encoder(x), second)
    encoder.load_state_dict(state)
    assert torch.equal(encoder(x), first)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_layers_share_codes_and_own_their_gates(name, attention):
    encoding = make(name)
    encoder = stack(Encoder, encoding, per_layer="gate", layers=3, impl="auto", attention=attention)
    own = [layer.attention.encoding for layer in encoder.layers]
    assert len({id(each.gate) for each in own}) == 3 and own[0] is encoding
    for key, parameter in encoding.named_parameters():
        assert key == "gate" or all(dict(each.named_parameters())[key] is parameter for each in own)
    plain = stack(Encoder, None, layers=3, impl="auto", attention=attention)
    assert size(encoder) == size(plain) + size(encoding) + 2 * encoding.gate.numel()
    decoder, x = stack(Decoder, name, per_layer="gate", impl="auto", attention=attention), tokens()
    assert_same(in_chunks(decoder, x, [4, 1, 6]), decoder(x))
    if attention == "linear":
        favor = encoder.layers[0].attention.feature_map
        for layer in encoder.layers:
            layer.attention.feature_map = favor
    # With shut gates all layers make the same of the same input, in training as well; open ones have noise of their own.
    for training, gate in itertools.product((False, True), (-200.0, 0.0)):
        with torch.no_grad():
            for each in own:
                each.gate.fill_(gate)
        outs = attention_outputs(deepcopy(encoder).train(training), tokens())
        for other in outs[1:]:
            if gate < 0.0:
                assert_same(other, outs[0])
            else:
                assert not torch.allclose(other, outs[0], rtol=1e-3)


def test_linear_layers_with_their_own_encodings_draw_their_own_codes():
    encoding, favor = make("sine-spe"), lagwise.Favor(16)
    for given, same in ((encoding, True), ([encoding, deepcopy(encoding)], False)):
        outs = attention_outputs(linear_stack(Encoder, given, feature_map=favor), tokens())
        (assert_same if same else assert_different)(outs[1], outs[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("linear_name", LINEAR)
def test_linear_stacks_move_to_another_dtype(linear_name, dtype):
    model, x = linear_stack(Decoder, make(linear_name), feature_map="elu").to(dtype), tokens().to(dtype)
    out = model(x)
    exact = model.double()(x.double())
    assert out.dtype == dtype
    assert float((out.double() - exact).detach().abs().max()) <= 16 * torch.finfo(dtype).eps


def test_tied_layers_are_one_layer_passed_again():
    tied = lagwise.nn.Decoder(8, layers=3, heads=2, encoding="t5", tied=True)
    layers = lagwise.nn.Decoder(8, layers=3, heads=2, encoding="t5")
    one = tied.state_dict()
    layers.load_state_dict({name: one[re.sub(r"layers\.\d", "layers.0", name)] for name in layers.state_dict()})
    x, cache = torch.randn(2, 7, 8), tied.new_cache()
    assert torch.equal(tied(x), layers(x))
    steps = torch.cat([tied(x[:, :4], cache=cache), tied(x[:, 4:], cache=cache)], dim=1)
    torch.testing.assert_close(steps, tied(x))


def test_tied_layers_share_their_encoding():
    with pytest.raises(ValueError, match="tied layers share one encoding: leave per_layer out"):
        lagwise.nn.Encoder(8, layers=3, heads=2, encoding="t5", per_layer=True, tied=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: Encoder(16, layers=1, heads=2)(x, lenghts=1), "Encoder.forward has no option 'lenghts': .* 'lengths'"),
        (lambda x: Decoder(16, layers=1, heads=2)(x, lenghts=1), "Decoder.forward has no option 'lenghts': .* 'lengths'"),
        (lambda x: Layer(16, heads=2)(x, key_masks=1), "Layer.forward has no option 'key_masks': did you mean 'key_mask'"),
        (lambda x: RelativeAttention(16, heads=2)(x, mask=1), "RelativeAttention.forward has no option 'mask': .* 'key_mask'"),
        (lambda x: Decoder(16, layers=1, heads=2, causal=True), "Decoder has no option 'causal': it is always causal"),
        (lambda x: Encoder(16, layers=1, heads=2, cross=True), "Encoder takes no context"),
        (lambda x: attention_parts(x[None], x[None], dropout=0.5), "attention_parts has no option 'dropout'"),
    ],
)  # fmt: skip
def test_options_that_are_not_there_are_refused_in_the_name_of_who_lacks_them(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.randn(1, 5, 16))


def test_bad_arguments_are_refused_in_words_under_autocast_too():
    q = torch.randn(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="attention has no option 'bla'"):
        lagwise.attention(q, None, q, bla=1)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="k must be a tensor"):
        lagwise.attention(q, None, q)
