"""Plugin packages on disk: what is found, and what is said of each kind of broken one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.core.errors import DuplicatePluginError, InvalidOptionsError, PluginLoadError, UnknownPluginError
from octavo.core.observers import Observers
from octavo.core.registry import Registry
from octavo.core.testing.fake_plugins import write_package

GOOD = """
from octavo.core.hookspecs import hookimpl
from octavo.core.testing.fake_plugins import fake_scheduler

@hookimpl
def octavo_schedulers():
    return [fake_scheduler("{name}")]
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path; modules imported from it are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def discover(site: Path, **environ: str) -> Registry:
    return Registry.discover(environ=environ, path=[str(site)])


def only_failure(registry: Registry) -> str:
    assert len(registry.failures) == 1
    return str(registry.failures[0])


def test_finds_a_package_and_says_who_provides_it(site: Path) -> None:
    """An entry point of group `octavo` is imported, its descriptors are there by name, with distribution and version."""
    write_package(site, "octavo-fair", "0.3", fair_module=GOOD.format(name="fair"))
    registry = discover(site)
    assert registry.names("scheduler") == ["fair"]
    assert registry.get("scheduler", "fair").summary == "a fake scheduler"
    assert registry.provider("scheduler", "fair") == ("octavo-fair", "0.3")
    assert registry.problems() == []


def test_installing_never_activates(site: Path) -> None:
    """`auto` looks at plugins of the octavo distribution only, in order of preference."""
    source = GOOD.replace('fake_scheduler("{name}")', 'fake_scheduler("one", preference=1), fake_scheduler("two", preference=2)')
    write_package(site, "octavo", "0.1", built_in_module=source)
    write_package(site, "octavo-fair", "0.3", fair_module=GOOD.format(name="fair"))
    registry = discover(site)
    assert registry.names("scheduler") == ["fair", "one", "two"]
    assert [plugin.name for plugin in registry.preferred("scheduler")] == ["two", "one"]


def test_a_package_without_our_group_is_left_alone(site: Path) -> None:
    """Other groups' entry points are not imported."""
    write_package(site, "other", other_module="raise RuntimeError('imported')")
    (site / "other-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nother_module = other_module\n")
    assert discover(site).problems() == []


def test_the_first_of_two_equal_distributions_counts(site: Path, tmp_path: Path) -> None:
    """A distribution found twice on the path is the one that an import would find."""
    write_package(site, "octavo-fair", "2.0", fair_module=GOOD.format(name="fair"))
    write_package(site / "later", "octavo-fair", "1.0", fair_module=GOOD.format(name="fair"))
    registry = Registry.discover(environ={}, path=[str(site), str(site / "later")])
    assert registry.provider("scheduler", "fair") == ("octavo-fair", "2.0")


def test_broken_package_is_explained_when_selected_and_hurts_nobody_else(site: Path) -> None:
    """A plugin that cannot be imported is recorded; other plugins work; selecting it says which package failed and why."""
    write_package(site, "octavo-broken", "0.9", broken="import no_such_module_anywhere")
    write_package(site, "octavo-fair", "0.3", fair_module=GOOD.format(name="fair"))
    registry = discover(site)
    reason = "octavo-broken 0.9 (entry point 'broken'): ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert registry.problems() == [reason]
    assert registry.get("scheduler", "fair")
    with pytest.raises(PluginLoadError) as loading:
        registry.get("scheduler", "broken")
    assert str(loading.value) == f"scheduler 'broken' cannot be used, its package failed to load: {reason}"


def test_unknown_plugin_lists_known_ones_nearest_match_and_failed_packages(site: Path) -> None:
    """A wrong name is answered with everything that helps to find the right one."""
    write_package(site, "octavo-broken", "0.9", broken="raise SystemExit(3)")
    write_package(site, "octavo-fair", "0.3", fair_module=GOOD.format(name="fair"), slow_module=GOOD.format(name="slow"))
    with pytest.raises(UnknownPluginError) as unknown:
        discover(site).get("scheduler", "fairr")
    assert str(unknown.value) == (
        "no scheduler plugin 'fairr' is installed (did you mean fair?); installed are: fair, slow\n"
        "These plugin packages failed to load:\n"
        "  - octavo-broken 0.9 (entry point 'broken'): SystemExit: 3"
    )


def test_duplicate_name_names_both_providers_when_selected(site: Path) -> None:
    """Two packages with one name: neither wins, other names work, the error names both."""
    write_package(site, "octavo-fair", "0.3", fair_module=GOOD.format(name="fair"))
    write_package(site, "fairness", "2.0", fairness_module=GOOD.format(name="fair"), other_module=GOOD.format(name="other"))
    registry = discover(site)
    text = (
        "scheduler 'fair' is provided by fairness 2.0 (entry point 'fairness_module') and by octavo-fair 0.3 (entry point 'fair_module'); "
        "uninstall one of them, or switch its entry point off with OCTAVO_DISABLE_PLUGINS"
    )
    with pytest.raises(DuplicatePluginError) as duplicate:
        registry.get("scheduler", "fair")
    assert str(duplicate.value) == text
    assert registry.problems() == [text]
    assert registry.get("scheduler", "other")
    assert [plugin.name for plugin in registry.descriptors("scheduler")] == ["other"]
    assert discover(site, OCTAVO_DISABLE_PLUGINS="fair_module").provider("scheduler", "fair") == ("fairness", "2.0")


HOOKS = (
    "octavo_models, octavo_schedulers, octavo_allocators, octavo_kernels, octavo_ops, "
    "octavo_engine_started, octavo_step_finished, octavo_request_finished"
)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(
            GOOD.replace("octavo_schedulers", "octavo_schedulerz"),
            f"there is no hook 'octavo_schedulerz' (did you mean octavo_schedulers?); hooks are {HOOKS}",
            id="misspelt hook",
        ),
        pytest.param("x = 1", "it registers nothing: no function in it is marked with @octavo.core.hookspecs.hookimpl", id="empty module"),
        pytest.param(
            GOOD.replace("@hookimpl", ""),
            "it registers nothing: octavo_schedulers is not marked with @octavo.core.hookspecs.hookimpl",
            id="forgotten mark",
        ),
        pytest.param(
            GOOD.replace('[fake_scheduler("{name}")]', "[]"), "its hooks return no descriptor, so it registers nothing", id="empty list"
        ),
        pytest.param(
            GOOD.replace('[fake_scheduler("{name}")]', "['fair']"),
            "octavo_schedulers: expected a SchedulerPlugin, got 'fair'",
            id="no descriptor",
        ),
        pytest.param(
            GOOD.replace("[fake", "fake").replace(")]", ")"),
            "octavo_schedulers must return a list of descriptors, not a single one",
            id="single descriptor",
        ),
        pytest.param(
            GOOD.replace('"{name}"', '"Fair-Share"'),
            "octavo_schedulers: scheduler 'Fair-Share': a name is made of lower-case letters, digits and underscores",
            id="bad name",
        ),
        pytest.param(
            GOOD.replace('"{name}"', '"auto"'), "octavo_schedulers: scheduler 'auto': this name is taken by the config", id="reserved name"
        ),
        pytest.param(GOOD.replace("return", "raise ValueError('no licence'); return"), "ValueError: no licence", id="hook raises"),
    ],
)
def test_bad_modules_are_refused_with_the_reason(site: Path, source: str, reason: str) -> None:
    """A module that cannot be right is a failure with distribution, version and reason, and none of its plugins is there."""
    write_package(site, "octavo-bad", "0.1", bad_module=source)
    registry = discover(site)
    assert only_failure(registry) == f"octavo-bad 0.1 (entry point 'bad_module'): {reason}"
    assert registry.names("scheduler") == []


def test_descriptor_of_another_kind_is_refused(site: Path) -> None:
    """A kernel returned by octavo_schedulers is not taken for either."""
    write_package(site, "octavo-bad", bad_module=GOOD.replace("fake_scheduler", "fake_kernel").format(name="x"))
    registry = discover(site)
    assert "octavo_schedulers: expected a SchedulerPlugin, got KernelPlugin(name='x'" in only_failure(registry)
    assert registry.names("kernel") == []


def test_wrong_hook_arguments_are_refused(site: Path) -> None:
    """A hook with an argument that its spec lacks is a failure that names the argument."""
    write_package(site, "octavo-bad", bad_module=GOOD.replace("octavo_schedulers()", "octavo_schedulers(engine)").format(name="x"))
    failure = only_failure(discover(site))
    assert "PluginValidationError" in failure
    assert "{'engine'}" in failure


def test_single_packages_can_be_switched_off(site: Path) -> None:
    """OCTAVO_DISABLE_PLUGINS names entry points; a switched-off plugin is unknown, and the error says why."""
    write_package(site, "octavo-fair", "0.3", fair_module=GOOD.format(name="fair"), other_module=GOOD.format(name="other"))
    registry = discover(site, OCTAVO_DISABLE_PLUGINS="fair_module, ")
    assert registry.names("scheduler") == ["other"]
    with pytest.raises(UnknownPluginError) as unknown:
        registry.get("scheduler", "fair")
    assert str(unknown.value) == (
        "no scheduler plugin 'fair' is installed; installed are: other\n"
        "Switched off by the environment: octavo-fair 0.3 (entry point 'fair_module')"
    )


def test_all_third_party_packages_can_be_switched_off(site: Path) -> None:
    """OCTAVO_NO_PLUGINS=1 leaves the built-ins, and does not even import the others."""
    write_package(site, "octavo", "0.1", built_in_module=GOOD.format(name="built_in"))
    write_package(site, "octavo-bad", "0.1", bad_module="raise RuntimeError('imported')")
    registry = discover(site, OCTAVO_NO_PLUGINS="1")
    assert registry.names("scheduler") == ["built_in"]
    assert registry.problems() == []
    assert "bad_module" not in sys.modules


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            {"OCTAVO_DISABLE_PLUGINS": "fair_modul"},
            "OCTAVO_DISABLE_PLUGINS names 'fair_modul', but no installed entry point is called that (did you mean fair_module?); "
            "installed are: fair_module",
        ),
        ({"OCTAVO_NO_PLUGINS": "yes"}, "OCTAVO_NO_PLUGINS must be 1 (no third-party plugins) or 0, not 'yes'"),
    ],
)
def test_switches_that_make_no_sense_are_errors(site: Path, environ: dict[str, str], text: str) -> None:
    """A typo in a switch is said, not ignored: the plugin would stay on without a word."""
    write_package(site, "octavo-fair", fair_module=GOOD.format(name="fair"))
    with pytest.raises(InvalidOptionsError) as error:
        discover(site, **environ)
    assert str(error.value) == text


def test_observers_are_told_and_each_alone(site: Path) -> None:
    """A module with only observer hooks is an observer, told by itself; a hook may leave its argument out."""
    source = """
from octavo.core.hookspecs import hookimpl
seen = []

@hookimpl
def octavo_step_finished({argument}):
    seen.append({seen})
"""
    write_package(
        site, "octavo-watch", watch_one=source.format(argument="report", seen="report"), watch_two=source.format(argument="", seen="1")
    )
    registry = discover(site)
    assert registry.problems() == []
    for observer in registry.observers:
        told = Observers()
        told.add_hooks(observer.hooks)
        told.tell("step_finished", "a report")
        assert not told.wanted("request_finished")
    assert sys.modules["watch_one"].seen == ["a report"]
    assert sys.modules["watch_two"].seen == [1]
