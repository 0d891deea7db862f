//! Prints what trialrun would do with a project folder, as JSON: `cargo run -p trialrun-project --example plan -- PATH [WORKERS]`.

use trialrun_project::{
    CoverageOptions, InspectOptions, TestOptions, create_venv, inspect, test_command, upload_rules,
};

fn main() {
    let mut args = std::env::args().skip(1);
    let path = std::path::PathBuf::from(args.next().unwrap_or_else(|| ".".to_owned()));
    let workers = args.next();
    let options = InspectOptions { coverage: true, parallel: workers.is_some(), ..InspectOptions::default() };
    let project = match inspect(&path, &options) {
        Ok(project) => project,
        Err(e) => {
            eprintln!("{e}");
            std::process::exit(1);
        }
    };
    let cov = Some(CoverageOptions {
        html_dir: "/var/lib/trialrun/out/htmlcov".to_owned(),
        json_path: "/var/lib/trialrun/out/coverage.json".to_owned(),
    });
    let test = test_command(
        &project,
        &TestOptions { junit_path: "/var/lib/trialrun/out/junit.xml".to_owned(), cov, workers, extra_args: Vec::new() },
    );
    let added = project.plan.tools_to_add(&std::collections::BTreeMap::new());
    let rules = upload_rules(&path);
    let all = serde_json::json!({
        "venv": create_venv(), "project": project, "test": test, "tools_if_none": project.plan.tools_step(&added),
        "use_gitignore": rules.use_gitignore,
    });
    println!("{all:#}");
}
