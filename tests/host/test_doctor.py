"""What `cuk doctor` finds on machines that lack things, each named with its remedy; no machine makes it fail."""

import sys
from types import SimpleNamespace

import pytest

from cuk import doctor


def findings():
    return {f.what: f for f in doctor.examine()}


def fake_cupy(built=13000, driver=13000, capability=(9, 0)):
    runtime = SimpleNamespace(
        runtimeGetVersion=lambda: built,
        driverGetVersion=lambda: driver,
        getDeviceProperties=lambda device: {"name": b"NVIDIA H200", "major": capability[0], "minor": capability[1]},
    )
    cuda = SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(id=0), curand=SimpleNamespace(getVersion=lambda: 1))
    return SimpleNamespace(__version__="14.2.0", cuda=cuda)


@pytest.mark.parametrize("module, what", [("cupy", ["CuPy", "GPU", "random numbers"]), ("cuda.bindings", ["CUDA bindings", "driver"])])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, module, what):
    monkeypatch.setitem(sys.modules, module, None)
    found = findings()
    for name in what:
        assert not found[name].ok and found[name].needed and found[name].remedy, found[name]
    assert "pip install" in found[what[0]].remedy


def test_what_only_some_uses_need_makes_nothing_impossible(monkeypatch):
    for module in ("torch", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(doctor, "toolkit_include_dirs", lambda: ())
    found = findings()
    for what in ("torch", "matplotlib", "toolkit headers"):
        assert not found[what].ok and not found[what].needed and "pip install" in found[what].remedy


def test_a_whole_machine_passes(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    found = findings()
    assert found["CuPy"].found == "14.2.0" and found["GPU"].found == "NVIDIA H200" and found["random numbers"].ok


def test_a_cupy_for_a_newer_driver_is_told_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(built=13000, driver=12080))
    finding = findings()["CuPy"]
    assert not finding.ok and "is for CUDA 13, the driver runs up to 12: cuk[cuda12]" in finding.found


def test_another_architecture_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(capability=(8, 0)))
    finding = findings()["GPU"]
    assert not finding.ok and "compute capability 8.0" in finding.found


def test_a_compiler_that_fails_is_reported_not_raised(monkeypatch):
    def refuse(*arguments, **keywords):
        raise ImportError("NVRTC cannot be loaded (x)\nmore")

    monkeypatch.setattr(doctor, "compile", refuse)
    finding = findings()["NVRTC and headers"]
    assert not finding.ok and finding.found == "ImportError: NVRTC cannot be loaded (x)" and "pip install" in finding.remedy
