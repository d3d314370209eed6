//! docs/guarantees.md names tests that exist.

use std::fs;
use std::path::Path;

/// The text of every Rust file below a directory.
fn sources(directory: &Path, all: &mut String) {
    for entry in fs::read_dir(directory).expect("a readable directory") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                sources(&path, all);
            }
        } else if name.ends_with(".rs") {
            all.push_str(&fs::read_to_string(&path).expect("a readable file"));
        }
    }
}

#[test]
fn every_promise_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let document = fs::read_to_string(root.join("docs/guarantees.md")).expect("the document");
    let mut code = String::new();
    sources(&root, &mut code);
    let mut promises = 0;
    for line in document.lines().filter(|line| line.starts_with("| ")) {
        let shown_by = line.split('|').nth(2).expect("two columns");
        let tests: Vec<_> = shown_by.split('`').skip(1).step_by(2).collect();
        if line.starts_with("| promise") {
            continue;
        }
        assert!(!tests.is_empty(), "no test shows: {line}");
        for test in tests {
            let by_name = code.contains(&format!("fn {test}("));
            let by_table =
                code.contains(&format!("{test}: ")) || code.contains(&format!("{test},"));
            assert!(by_name || by_table, "{test} does not exist");
        }
        promises += 1;
    }
    assert!(promises > 20, "{promises} promises were found");
}
