import ray

from nas.study.ray_tune import Resources, _start_ray


def test_a_study_on_this_machine_stays_on_loopback_whatever_ray_address_says(monkeypatch):
    """The switch is Ray's own and not public: this fails if a release renames it."""
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    _start_ray(Resources(max_concurrent=1, threads_per_trial=1), {"NAS_TEST": "1"})
    try:
        assert [node["NodeManagerAddress"] for node in ray.nodes()] == ["127.0.0.1"]
        assert ray.cluster_resources()["CPU"] == 1
    finally:
        ray.shutdown()
