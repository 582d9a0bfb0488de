"""What runs on the cluster: each module's `observe(job)` returns the document that a lesson judges."""
