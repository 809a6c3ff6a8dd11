import jax
import numpy as np
import pytest

from experiments.benchmarks.pipelines import (
    SIZES,
    VOCAB,
    lively_params,
    norm_error,
    padded,
    random_batch,
    sequential,
    small_model,
    worst_error,
)
from jaxpipe.models.piece import apply_model


def test_errors_by_hand():
    expected = {"a": np.array([1.0, -2.0]), "b": np.array([[4.0]])}
    found = {"a": np.array([1.0, -1.5]), "b": np.array([[3.0]])}
    assert worst_error(found, expected) == 0.25
    assert norm_error(found, expected) == pytest.approx(np.sqrt(1.25 / 21))
    assert worst_error(expected, expected) == norm_error(expected, expected) == 0


def test_an_error_where_nothing_was_expected_is_infinite():
    with np.errstate(divide="ignore"):
        assert worst_error({"a": np.float32([1.0])}, {"a": np.float32([0.0])}) == np.inf


def test_not_a_number_is_no_small_error():
    bad, good = {"a": np.float32([np.nan])}, {"a": np.float32([1.0])}
    assert not worst_error(bad, good) <= 1
    assert not norm_error(bad, good) <= 1


def test_micro_batches_differ_in_what_counts():
    batch = random_batch(0, 4, 8, 32)
    shares = batch["weights"].mean((1, 2))
    np.testing.assert_allclose(shares, [0.25, 0.5, 0.75, 1], atol=0.1)
    starts = np.diff(batch["segments"], axis=-1) == 1
    assert starts.any()
    assert not batch["positions"][..., 1:][starts].any()
    assert (np.diff(batch["positions"], axis=-1)[~starts] == 1).all()
    assert batch["tokens"].max() < VOCAB


def test_padding_adds_micro_batches_that_do_not_count():
    batch = random_batch(0, 2, 1, 8)
    longer = padded(batch, 5, np.nan)
    assert all(value.shape == (5, 1, 8) for value in longer.values())
    assert np.isnan(longer["weights"][2:]).all()
    for name, value in batch.items():
        np.testing.assert_array_equal(longer[name][:2], value)


@pytest.mark.parametrize("family", SIZES)
def test_the_reference_is_the_gradient_of_the_whole_batch(family):
    model, params, batch = small_model(family), lively_params(family), random_batch(0, 3, 2, 16)

    def whole(params):
        flat = {name: value.reshape(6, 16) for name, value in batch.items()}
        return apply_model(model, params, flat)["nll"] / batch["weights"].sum()

    loss, grads = jax.device_get(jax.jit(jax.value_and_grad(whole))(params))
    found_loss, found = sequential(model)(params, batch)
    assert found_loss == pytest.approx(float(loss), rel=1e-6)
    assert norm_error(found, grads) < 1e-5
    assert worst_error(found, grads) < 1e-4
