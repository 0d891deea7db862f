//! Folders as they come, and what is made of them.

use super::*;
use std::collections::BTreeMap;
use tempfile::TempDir;

fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    dir
}

fn read(files: &[(&str, &str)]) -> Project {
    read_with(files, &InspectOptions { coverage: true, ..InspectOptions::default() })
}

fn read_with(files: &[(&str, &str)], options: &InspectOptions) -> Project {
    inspect(folder(files).path(), options).unwrap()
}

fn words(project: &Project) -> Vec<String> {
    // After `python -I -m pip install --no-input --disable-pip-version-check --progress-bar=off`.
    project.plan.steps.iter().map(|s| s.argv[8..].join(" ")).collect()
}

fn options(cov: bool, workers: Option<&str>) -> TestOptions {
    let cov = cov.then(|| CoverageOptions { html_dir: "/o/h".to_owned(), json_path: "/o/c.json".to_owned() });
    TestOptions {
        junit_path: "/o/j.xml".to_owned(),
        cov,
        workers: workers.map(str::to_owned),
        extra_args: vec!["-x".to_owned()],
    }
}

fn installed(list: &[(&str, &str)]) -> BTreeMap<String, String> {
    list.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn pytest_is_recognised_by_any_of_its_marks() {
    for (file, content) in [
        ("pytest.ini", ""),
        (".pytest.ini", "[pytest]"),
        ("pytest.toml", "[pytest]"),
        ("pyproject.toml", "[tool.pytest.ini_options]\n"),
        ("pyproject.toml", "[tool.pytest]\n"),
        ("tox.ini", "[pytest]\n"),
        ("setup.cfg", "[tool:pytest]\n"),
        ("conftest.py", ""),
        ("a/b/test_x.py", ""),
        ("x_test.py", ""),
        ("tests/cases.py", ""),
    ] {
        let project = read(&[(file, content)]);
        assert!(matches!(project.runner, Runner::Pytest { .. }), "{file}");
    }
    for (file, content) in
        [("a.py", ""), ("tox.ini", "[testenv]\n"), ("tests/x.js", ""), ("node_modules/x/test_a.py", "")]
    {
        assert!(read(&[(file, content)]).require_runner().is_err(), "{file}");
    }
}

#[test]
fn without_a_runner_the_error_names_the_way_out() {
    let dir = folder(&[("package.json", "{}")]);
    let text = inspect(dir.path(), &InspectOptions::default()).unwrap().require_runner().unwrap_err().to_string();
    assert!(text.contains("pass -- COMMAND") && text.contains("npm test"), "{text}");
}

#[test]
fn paths_that_are_no_folder_are_named() {
    let dir = folder(&[("file", "")]);
    let file = inspect(&dir.path().join("file"), &InspectOptions::default()).unwrap_err();
    assert!(
        matches!(&file, ProjectError::NotADirectory { .. })
            && file.to_string().contains(&dir.path().display().to_string())
    );
    let none = inspect(&dir.path().join("none"), &InspectOptions::default()).unwrap_err();
    assert!(matches!(none, ProjectError::Missing { .. }));
    // A path through a file says "not a directory", which is no missing path.
    assert!(inspect(&dir.path().join("file/x"), &InspectOptions::default()).is_err());
}

#[test]
fn strange_entries_do_not_disturb_detection() {
    use std::os::unix::{ffi::OsStrExt, fs::symlink};
    let dir = folder(&[("tests/test_a.py", "")]);
    symlink(dir.path(), dir.path().join("tests/loop")).unwrap();
    symlink("uv.lock", dir.path().join("uv.lock")).unwrap();
    fs::write(dir.path().join(std::ffi::OsStr::from_bytes(b"test_\xff.py")), "").unwrap();
    fs::create_dir(dir.path().join("setup.cfg")).unwrap();
    for fifo in ["requirements.txt", "pyproject.toml"] {
        if !std::process::Command::new("mkfifo").arg(dir.path().join(fifo)).status().is_ok_and(|s| s.success()) {
            eprintln!("skipped the FIFO: no mkfifo");
        }
    }
    let project = inspect(dir.path(), &InspectOptions::default()).unwrap();
    assert!(project.require_runner().is_ok() && project.plan.steps.is_empty(), "{:?}", project.plan.steps);
}

#[test]
fn a_huge_folder_is_looked_at_only_so_far() {
    let dir = folder(&[]);
    let mut deep = dir.path().to_owned();
    for _ in 0..40 {
        deep.push("d");
    }
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("test_x.py"), "").unwrap();
    let project = inspect(dir.path(), &InspectOptions::default()).unwrap();
    assert!(project.require_runner().is_err());
    assert!(project.plan.notes.iter().any(|n| n.contains("very large")));
}

#[test]
fn broken_files_are_errors_with_place_and_way_out() {
    for name in ["pyproject.toml", "uv.lock", "poetry.lock"] {
        let dir = folder(&[("tests/test_a.py", ""), (name, "version = 1\n[[package]\nname =")]);
        let error = inspect(dir.path(), &InspectOptions::default()).unwrap_err();
        assert!(
            matches!(&error, ProjectError::Broken { path, line: Some(2), column: Some(_), .. } if path == Path::new(name)),
            "{error:?}"
        );
        assert!(error.to_string().contains("--no-install"), "{error}");
        let project = inspect(dir.path(), &InspectOptions { no_install: true, ..InspectOptions::default() }).unwrap();
        assert!(project.plan.steps.is_empty());
    }
    let error = inspect(folder(&[("uv.lock", "version = 7")]).path(), &InspectOptions::default()).unwrap_err();
    assert!(error.to_string().contains("uv.lock") && error.to_string().contains('7'), "{error}");
}

#[test]
fn everything_goes_into_one_pip_command() {
    let project = read(&[
        ("requirements.txt", "flask==3.0\n"),
        ("requirements-test.txt", "-r requirements.txt\npytest-mock\n"),
        ("requirements-dev.txt", "black\n"),
        (
            "pyproject.toml",
            "[build-system]\nrequires=['setuptools']\n[project]\nname='x'\nrequires-python='>=3.12'\ndependencies=['attrs']\n[project.optional-dependencies]\nTest=['hypothesis']\ndev=['ruff']\ndocs=['sphinx']\n[dependency-groups]\ntests=['pytest>=8', {include-group='more'}, '--index-url=http://evil']\nmore=['anyio[trio] >= 4 ; python_version>\"3\"']\n",
        ),
    ]);
    assert_eq!(
        words(&project),
        ["-r requirements.txt -r requirements-test.txt pytest>=8 anyio[trio] >= 4 ; python_version>\"3\" -e .[test]"]
    );
    assert!(project.plan.notes.iter().any(|n| n.contains("Python >=3.12")));
    assert!(project.plan.notes.iter().any(|n| n.contains("not a requirement")));
    assert_eq!(project.plan.pins["flask"], "3.0");
    assert!(
        ["attrs", "hypothesis", "pytest", "pytest-mock", "anyio"]
            .iter()
            .all(|n| project.plan.declared.contains_key(*n))
    );
    assert_eq!(project.extras, ["test"]);
}

#[test]
fn hashed_requirements_have_a_command_of_their_own() {
    let project = read(&[
        ("setup.py", "setup(extras_require={'testing': []})"),
        ("requirements.txt", "a==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\nb==2 --hash=sha256:22 # c\n"),
    ]);
    assert_eq!(words(&project), ["-r requirements.txt", "-e .[testing]"]);
    assert_eq!(project.plan.pins.len(), 2);
}

#[test]
fn test_names_come_before_tox_and_tox_before_dev() {
    let group = "[dependency-groups]\ndev=['ruff']\n";
    let tox = "[testenv]\ndeps =\n  pytest-asyncio\n  py39: old\n  {[base]deps}\n  -r{toxinidir}/t.txt\n[testenv:lint]\ndeps = flake8\n";
    let project = read(&[("pyproject.toml", group), ("tox.ini", tox), ("t.txt", "freezegun")]);
    assert_eq!(words(&project), ["-r t.txt pytest-asyncio"]);
    assert_eq!(words(&read(&[("pyproject.toml", group)])), ["ruff"]);
    let project = read(&[("pyproject.toml", "[dependency-groups]\ndev=['ruff']\ntest=['pytest']"), ("tox.ini", tox)]);
    assert_eq!(words(&project), ["pytest"]);
}

#[test]
fn extras_that_do_not_exist_are_not_asked_for() {
    let asked = InspectOptions { extras: vec!["web".to_owned(), "nope".to_owned()], ..InspectOptions::default() };
    let project = read_with(
        &[("pyproject.toml", "[build-system]\n[project]\nname='x'\n[project.optional-dependencies]\nweb=[]\ntest=[]")],
        &asked,
    );
    assert_eq!(words(&project), ["-e .[web]"]);
    assert!(project.plan.notes.iter().any(|n| n.contains("no extra nope")));
}

#[test]
fn groups_that_include_each_other_are_an_error() {
    let dir = folder(&[(
        "pyproject.toml",
        "[dependency-groups]\ntest=[{include-group='a'}]\na=[{include-group='B'}]\nb=[{include-group='A'}]",
    )]);
    let error = inspect(dir.path(), &InspectOptions::default()).unwrap_err();
    assert!(matches!(&error, ProjectError::GroupCycle { chain } if chain == &["a", "b", "a"]), "{error}");
}

#[test]
fn a_lock_decides_the_versions() {
    let lock = "version = 1\n[[package]]\nname='x'\nsource={editable='.'}\ndependencies=[{name='a'}]\n[package.dev-dependencies]\ntest=[{name='pytest'}]\n[[package]]\nname='a'\nversion='1.0'\nsource={registry='https://index.test/simple'}\n[[package]]\nname='pytest'\nversion='8.1'\nsource={registry='https://index.test/simple'}\n";
    let project = read(&[
        ("uv.lock", lock),
        ("requirements.txt", "a==9"),
        (
            "pyproject.toml",
            "[build-system]\n[project]\nname='x'\ndependencies=['a']\n[dependency-groups]\ntest=['pytest']",
        ),
    ]);
    assert_eq!(words(&project), ["-r /var/lib/trialrun/plan/locked.txt -e ."]);
    assert_eq!(project.plan.files[0].content, "a==1.0\npytest==8.1\n");
    assert_eq!(project.plan.pins["a"], "1.0");
}

#[test]
fn poetry_projects_are_read_with_and_without_a_lock() {
    let pyproject = "[tool.poetry]\nname='x'\npackage-mode=false\n[tool.poetry.dependencies]\npython='^3.9'\nrequests='^2.31'\nextra={version='1', optional=true}\n[tool.poetry.group.test.dependencies]\npytest='^8'\n";
    let project = read(&[("pyproject.toml", pyproject)]);
    assert_eq!(words(&project), ["pytest>=8,<9 requests>=2.31,<3"]);
    let lock = "[metadata]\nlock-version='2.1'\n[[package]]\nname='requests'\nversion='2.32'\n[[package]]\nname='pytest'\nversion='8.3'\n[package.dependencies]\npluggy='*'\n[[package]]\nname='pluggy'\nversion='1.5'\n[[package]]\nname='black'\nversion='24'\n";
    let project = read(&[("pyproject.toml", pyproject), ("poetry.lock", lock)]);
    assert_eq!(project.plan.files[0].content, "pluggy==1.5\npytest==8.3\nrequests==2.32\n");
}

#[test]
fn a_project_that_setuptools_would_refuse_is_not_installed_itself() {
    let pyproject = "[project]\nname='x'\nversion='1'\ndependencies=['attrs']\n";
    let project =
        read(&[("pyproject.toml", pyproject), ("app/a.py", ""), ("migrations/b.py", ""), ("tests/test_a.py", "")]);
    assert_eq!(words(&project), ["attrs"]);
    let project = read(&[("pyproject.toml", pyproject), ("app/a.py", ""), ("tests/test_a.py", "")]);
    assert_eq!(words(&project), ["-e ."]);
}

#[test]
fn only_absent_tools_are_added_and_none_changes_a_version() {
    let options = InspectOptions { coverage: true, parallel: true, ..InspectOptions::default() };
    let project = read_with(&[("tests/test_a.py", ""), ("requirements.txt", "Pytest_Cov\n")], &options);
    assert!(project.plan.declared.contains_key("pytest-cov"));
    let after = installed(&[("pytest", "8.0"), ("pytest_cov", "5.0")]);
    let mut added = project.plan.tools_to_add(&after);
    assert_eq!(added.iter().map(|a| a.package.as_str()).collect::<Vec<_>>(), ["pytest-xdist"]);
    let step = project.plan.tools_step(&added).unwrap();
    assert!(step.argv.ends_with(&["-c".to_owned(), CONSTRAINTS.to_owned(), "pytest-xdist".to_owned()]));
    project.plan.fill_versions(&mut added, &installed(&[("pytest-xdist", "3.8.0")]));
    assert_eq!(added[0].version.as_deref(), Some("3.8.0"));
    assert_eq!(project.plan.tools_step(&[]), None);
}

#[test]
fn the_plain_command_adds_reports_and_nothing_else() {
    let project = read(&[("tests/test_a.py", "")]);
    let command = test_command(&project, &options(true, None));
    assert_eq!(
        command.argv[1..].join(" "),
        "-m pytest --junitxml=/o/j.xml --cov=. --cov-fail-under=0 --cov-report=html:/o/h --cov-report=json:/o/c.json -x"
    );
    assert_eq!(
        test_command(&project, &options(false, Some("auto"))).argv[1..].join(" "),
        "-m pytest --junitxml=/o/j.xml -n auto -x"
    );
}

#[test]
fn the_projects_own_coverage_options_are_respected() {
    let command = |ini: &str, rc: &str| {
        let mut files = vec![("pytest.ini", ini)];
        if !rc.is_empty() {
            files.push((".coveragerc", rc));
        }
        test_command(&read(&files), &options(true, Some("2")))
    };
    let own = command("[pytest]\naddopts = --cov=pkg --cov-fail-under=80", "[run]\nplugins = x");
    assert_eq!(
        own.argv[3..].join(" "),
        "--junitxml=/o/j.xml --cov-report=html:/o/h --cov-report=json:/o/c.json -n 2 -x"
    );
    let blocked = command("[pytest]\naddopts = -p no:cov -p no:xdist -p no:junitxml", "");
    assert_eq!(
        (blocked.argv[3..].join(" ").as_str(), blocked.junit, blocked.coverage, blocked.notes.len()),
        ("-x", false, false, 3)
    );
    assert!(!command("[pytest]\naddopts = --no-cov", "").coverage);
    let harmless = command("[pytest]", "[run]\nbranch = true\nomit =\n  a\n[report]\nfail_under = 100");
    assert!(!harmless.argv.contains(&"--cov-config=/dev/null".to_owned()));
    for rc in ["[run]\nplugins = covdefaults", "[run]\ndynamic_context = test_function", "[run]\nconcurrency = gevent"]
    {
        let command = command("[pytest]", rc);
        assert!(command.argv.contains(&"--cov-config=/dev/null".to_owned()) && command.notes.len() == 1, "{rc}");
    }
    let quiet = command("[pytest]\naddopts = --disable-plugin-autoload", "");
    assert!(quiet.argv.join(" ").contains("-p pytest_cov") && quiet.argv.join(" ").contains("-p xdist -n 2"));
}

proptest::proptest! {
    #[test]
    fn any_text_in_any_file_is_read_without_a_crash(which in 0_usize..9, text in "(\\PC|[\\n\\[\\]{}=\"'# ]){0,200}") {
        let names = ["pyproject.toml", "uv.lock", "poetry.lock", "setup.cfg", "tox.ini", "setup.py", "requirements.txt", "pytest.ini", ".coveragerc"];
        let text = if which == 5 { format!("extras_require={{{text}") } else { text };
        let dir = folder(&[(names[which], &text)]);
        if let Ok(project) = inspect(dir.path(), &InspectOptions { coverage: true, ..InspectOptions::default() }) {
            let _ = test_command(&project, &options(true, None));
        }
    }

    #[test]
    fn any_marker_requirement_and_version_is_read_without_a_crash(text in "[a-z0-9_.<>=!~^|'\" ()*\\[\\],;@-]{0,60}") {
        let _ = requirement::marker_holds(&text);
        let _ = requirement::allows_python(&text);
        let _ = requirement::Requirement::parse(&text);
        let _ = poetry_specifier(&text);
    }
}

/// The script's lines that call pip, without what they all have in front; `#` after those whose lists follow.
fn early(project: &Project) -> (Vec<String>, BTreeMap<String, String>) {
    let dependencies = project.dependencies.as_ref().unwrap();
    let calls = dependencies.script.lines().filter(|line| line.contains(" pip "));
    let short = |line: &str| line.replace("/var/lib/trialrun/plan/", "").split(" -m pip ").nth(1).unwrap().to_owned();
    let words = |line: String| line.split(' ').filter(|w| !w.starts_with("--")).collect::<Vec<_>>().join(" ");
    let name = |path: &str| path.rsplit('/').next().unwrap().to_owned();
    let files = dependencies.files.iter().map(|f| (name(&f.path), f.content.clone())).collect();
    (calls.map(|line| words(short(line))).collect(), files)
}

#[test]
fn what_needs_nothing_of_the_folder_can_be_installed_before_it_is_there() {
    let pyproject = "[build-system]\nrequires=['hatchling', 'x @ https://h/x']\n[project]\nname='my.pkg'\ndependencies=['attrs>=1']\n[project.optional-dependencies]\ntest=['pytest-mock', 'rich ; python_version < \"4\"']\n";
    let files = [
        ("pyproject.toml", pyproject),
        ("requirements.txt", "--extra-index-url https://h/simple\n-r more.txt\nsix==1.16  # why\n"),
        ("more.txt", "-c limits.txt\nidna\n"),
        ("limits.txt", "idna<4\n"),
    ];
    let (calls, lists) = early(&read(&files));
    assert_eq!(
        calls,
        [
            "install -r wanted.txt -c wanted-constraints.txt",
            "install -c constraints.txt -r tools.txt",
            "download -q -d /tmp/trialrun-downloads -r later.txt || true"
        ]
    );
    assert_eq!(
        lists["wanted.txt"],
        "--extra-index-url https://h/simple\nidna\nsix==1.16\nattrs>=1\npytest-mock\nrich ; python_version < \"4\"\n"
    );
    assert_eq!(lists["wanted-constraints.txt"], "idna<4\n");
    assert_eq!(lists["tools.txt"], "pytest\npytest-cov\n");
    assert_eq!(lists["later.txt"], "hatchling\n");
}

#[test]
fn tools_wait_for_the_project_where_its_wishes_are_not_all_known() {
    let pyproject = "[build-system]\n[project]\nname='my.pkg'\n";
    for files in [
        &[("setup.py", "setup(install_requires=wishes())")][..],
        &[("pyproject.toml", "[build-system]\n[project]\nname='x'\ndynamic=['dependencies']\n")],
        &[("requirements.txt", "-e ./other\nsix\n")],
        &[("requirements.txt", "six\n-r nowhere.txt\n")],
        &[("requirements.txt", "git+https://h/r\n")],
        &[("requirements.txt", "x @ file:///workspace/x\n")],
        &[("requirements.txt", "./wheels/x.whl\n")],
        &[("requirements.txt", "--find-links wheels\nsix\n")],
        &[("pyproject.toml", &format!("{pyproject}dependencies=['my-pkg[other]']\n"))],
    ] {
        let (calls, lists) = early(&read(files));
        assert!(!lists.contains_key("tools.txt"), "{files:?}: {calls:?}");
        assert!(lists["later.txt"].contains("pytest-cov"), "{files:?}");
        let wanted = lists.get("wanted.txt").map_or("", String::as_str);
        assert!(["", "six\n"].contains(&wanted), "{files:?}: {wanted}");
    }
}

#[test]
fn lists_with_hashes_stay_alone_and_no_text_of_a_project_is_in_the_script() {
    let hashed = format!("six==1.16 --hash=sha256:{}\n", "a".repeat(64));
    let project = read(&[("requirements.txt", &hashed), ("requirements-test.txt", "idna; $(touch /x)\n`id`\n")]);
    let (calls, lists) = early(&project);
    assert_eq!(calls[..2], ["install -r hashed-0.txt", "install -r wanted.txt"]);
    assert_eq!(lists["hashed-0.txt"], hashed);
    let script = project.dependencies.unwrap().script;
    assert!(!script.contains("touch") && !script.contains("`id`") && !script.contains("six"), "{script}");
    let own = InspectOptions { own_command: true, ..InspectOptions::default() };
    let (_, lists) = early(&read_with(&[("requirements.txt", "six\n")], &own));
    assert!(!lists.contains_key("tools.txt") && !lists.contains_key("later.txt"), "{lists:?}");
    let nothing = InspectOptions { no_install: true, ..InspectOptions::default() };
    assert_eq!(read_with(&[("requirements.txt", "six\n")], &nothing).dependencies, None);
}
