"""What forward assigns to a buffer, of the model or of one inside, the next call finds there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar as ap
from autopar.errors import InvalidInput


def averaged(seen: Follows, mean: Tensor) -> Tensor:
    seen.state = 0.9 * seen.state + 0.1 * mean
    return seen.state


def counted(seen: Follows, mean: Tensor) -> Tensor:
    seen.count = seen.count + 1
    seen.count += 1
    return mean * seen.count


def doubled(seen: Follows, mean: Tensor) -> Tensor:
    seen.state += 1
    seen.state = seen.state * 2
    return seen.state


def rolled(seen: Follows, mean: Tensor) -> Tensor:
    seen.state = torch.roll(seen.state, 1, 0)
    seen.state[0] = mean.sum()
    return seen.state


def exchanged(seen: Follows, mean: Tensor) -> Tensor:
    seen.state, seen.other = seen.other, seen.state
    return seen.state + mean


def looked_back(seen: Follows, mean: Tensor) -> Tensor:
    before = seen.state
    seen.state = before + mean
    seen.state = seen.state * 2
    return before * 3 - seen.state


def registered(seen: Follows, mean: Tensor) -> Tensor:
    seen.register_buffer("state", seen.state + mean)
    return seen.state


def among_buffers(seen: Follows, mean: Tensor) -> Tensor:
    seen._buffers["state"] = seen._buffers["state"] + mean
    return seen.state


def only_written(seen: Follows, mean: Tensor) -> Tensor:
    seen.state = mean
    return mean


def made_anew(seen: Follows, mean: Tensor) -> Tensor:
    seen.state = torch.arange(4, dtype=torch.float64)
    return mean


def in_place(seen: Follows, mean: Tensor) -> Tensor:
    seen.state.copy_(mean + seen.state)
    seen.count += 1
    return seen.state * seen.count


WAYS = [
    *(averaged, counted, doubled, rolled, exchanged, looked_back, registered, among_buffers),
    *(only_written, made_anew, in_place),
]
Way = Callable[["Follows", Tensor], Tensor]


class Follows(nn.Module):
    """Keeps something of what it sees."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4).double()
        self.register_buffer("state", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("other", torch.ones(4, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.way(self, x.detach().mean(0))


class Blocks(nn.Module):
    """As often as `turns`, all in turn."""

    def __init__(self, way: Way, count: int, turns: int = 1) -> None:
        super().__init__()
        self.blocks, self.turns = nn.ModuleList(Follows(way) for _ in range(count)), turns

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.turns):
            for block in self.blocks:
                x = block(x)
        return x


FORMS: dict[str, Callable[[Way], nn.Module]] = {
    "itself": Follows,
    "inside": lambda way: nn.Sequential(Follows(way)),
    "blocks": lambda way: Blocks(way, 4),
    "twice": lambda way: Blocks(way, 2, turns=2),
}


def assert_goes_on_alike(plain: nn.Module, model: nn.Module, **options: object) -> None:
    """Three calls give the same, and leave the same in buffers."""
    model.load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = ap.parallelize(model, (x[0],), mesh=ap.Mesh(dp=2), backend="virtual", **options)
    for given in x:
        torch.testing.assert_close(module(given), plain(given))
        torch.testing.assert_close(module.full_state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_the_next_call_finds_what_was_assigned(way: Way, form: str) -> None:
    assert_goes_on_alike(FORMS[form](way), FORMS[form](way))


def test_blocks_whose_tensors_are_hidden_assign_too() -> None:
    assert_goes_on_alike(Blocks(averaged, 60), Blocks(averaged, 60))


def test_in_another_dtype_the_model_is_a_module_inside() -> None:
    precision = ap.Precision(compute=torch.float64, reduce=torch.float64)
    assert_goes_on_alike(Follows(counted), Follows(counted), precision=precision)


def test_who_was_given_the_buffer_sees_what_was_in_it() -> None:
    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Follows(averaged)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            before = self.inner.state
            return self.inner(x), before

    assert_goes_on_alike(Gives(), Gives())


class Shared(nn.Module):
    """Two that begin with one buffer."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.first, self.second = Follows(way), Follows(way)
        self.second.state = self.first.state

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_what_modules_share_is_written_to_in_place() -> None:
    assert_goes_on_alike(Shared(in_place), Shared(in_place))
    with pytest.raises(InvalidInput, match=r"first\.state and second\.state, which become two"):
        assert_goes_on_alike(Shared(averaged), Shared(averaged))


def test_a_buffer_does_not_become_another_one() -> None:
    def one_for_both(seen: Follows, mean: Tensor) -> Tensor:
        seen.state += mean
        result = seen.other * 1
        seen.other = seen.state
        return result

    with pytest.raises(InvalidInput, match=r"other, which becomes one with another tensor"):
        assert_goes_on_alike(Follows(one_for_both), Follows(one_for_both))


def test_a_buffer_is_not_taken_away() -> None:
    def forgotten(seen: Follows, mean: Tensor) -> Tensor:
        seen.state = None
        return mean

    with pytest.raises(InvalidInput, match=r"0\.state, which forward takes away"):
        assert_goes_on_alike(FORMS["inside"](forgotten), FORMS["inside"](forgotten))


def test_another_shape_is_refused_where_it_varies() -> None:
    def longer(seen: Follows, mean: Tensor) -> Tensor:
        seen.state = torch.cat([mean, mean])
        return mean

    with pytest.raises(InvalidInput, match=r"0\.state, float64\[4\] on cpu, which") as error:
        assert_goes_on_alike(FORMS["inside"](longer), FORMS["inside"](longer))
    assert "seen.state = torch.cat([mean, mean])" in str(error.value)


def test_a_table_that_is_made_anew_may_be_longer() -> None:
    def table(seen: Follows, mean: Tensor) -> Tensor:
        if len(seen.state) < 8:
            seen.state = torch.arange(8, dtype=torch.float64)
        return mean * seen.state[:4]

    plain, model = nn.Sequential(Follows(table)), nn.Sequential(Follows(table))
    model.load_state_dict(plain.state_dict())
    x = torch.ones(4, 4, dtype=torch.float64)
    module = ap.parallelize(model, (x,), mesh=ap.Mesh(dp=2), backend="virtual")
    torch.testing.assert_close(module(x), plain(x))
