import importlib.util

import pytest

import megatron_untied  # noqa: F401
from megatron_untied.backends import choose_backend
from megatron_untied.norms import LayerNorm, RMSNorm


@pytest.mark.parametrize(
    ("normalization", "norm"), [("RMSNorm", RMSNorm), ("LayerNorm", LayerNorm)]
)
def test_local_is_torch_norms_and_megatron_linears(normalization, norm):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    backend = choose_backend("local", normalization)
    assert backend.norm is norm
    assert backend.column_parallel_linear is ColumnParallelLinear
    assert backend.row_parallel_linear is RowParallelLinear


def test_transformer_engine_is_named_where_it_is_missing():
    if importlib.util.find_spec("transformer_engine"):
        pytest.skip("transformer-engine is installed")
    with pytest.raises(ImportError, match=r"--transformer-impl transformer_engine .*pip install"):
        choose_backend("transformer_engine", "RMSNorm")


@pytest.mark.gpu
def test_transformer_engine_classes_where_it_is_installed():
    pytest.importorskip("transformer_engine")
    backend = choose_backend("transformer_engine", "RMSNorm")
    names = [cls.__name__ for cls in (backend.norm, backend.column_parallel_linear)]
    assert names == ["TENorm", "TEColumnParallelLinear"]


def test_refuses_unknown_names():
    with pytest.raises(ValueError, match="transformer_impl 'apex' must be 'local' or"):
        choose_backend("apex", "RMSNorm")
    with pytest.raises(ValueError, match=r"normalization 'L2Norm' .* \['LayerNorm', 'RMSNorm'\]"):
        choose_backend("local", "L2Norm")
