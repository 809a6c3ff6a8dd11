import pytest
from jax.sharding import AxisType

from jaxpipe.runtime.mesh import describe, make_mesh


def test_axes_in_the_order_stage_data_model():
    mesh = make_mesh(2, 1, 4)
    assert dict(mesh.shape) == {"stage": 2, "data": 1, "model": 4}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert [d.id for d in mesh.devices.flat] == list(range(8))


def test_takes_the_first_devices_only():
    assert [d.id for d in make_mesh(3).devices.flat] == [0, 1, 2]


def test_more_devices_than_exist():
    message = (
        r"^field 'mesh' asks for 12 devices \(stage 3 x data 2 x model 2\), but JAX sees 8 \(cpu\); "
        "for virtual CPU devices set JAX_NUM_CPU_DEVICES=12 before the start$"
    )
    with pytest.raises(ValueError, match=message):
        make_mesh(3, 2, 2)


def test_describe_says_that_devices_are_virtual():
    line = "4 devices, cpu (virtual: they share the cores of this host): stage 2 x data 2 x model 1"
    assert describe(make_mesh(2, 2)) == line
