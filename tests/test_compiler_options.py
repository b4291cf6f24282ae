"""XLA's options of the step: those that are set are known, others are left out."""

from jaxstack.compiler_options import ALWAYS, PIPELINE, is_known, step_options


def test_options_follow_what_the_step_holds():
    plain, pipeline = step_options(), step_options(pipeline=True)
    assert plain == {option.name: option.value for option in ALWAYS}
    assert plain["xla_gpu_enable_triton_gemm"] is False
    assert pipeline == {**plain, **{option.name: option.value for option in PIPELINE}}


def test_an_option_that_the_installed_jaxlib_lacks_is_told_apart():
    assert not is_known("xla_gpu_no_such_option", True)
