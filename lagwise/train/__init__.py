"""The harness: trains, evaluates and compares encodings on the tasks of `lagwise.tasks`."""
