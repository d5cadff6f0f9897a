from benchmarks.step_shares import ATTENTION, EXCHANGE, OUTSIDE, PRODUCTS, own_microseconds


def event(name: str, start: float, stop: float, cat: str = "cpu_op", tid: int = 1) -> dict:
    return {"name": name, "ts": start, "dur": stop - start, "cat": cat, "tid": tid}


def test_time_is_an_operators_own_and_waiting_is_exchange():
    events = [
        event("iteration 2", 0, 100, "user_annotation"),
        event("_StreamedLayer", 0, 90),
        event("aten::linear", 0, 30),
        event("aten::mm", 5, 25),
        event("aten::_scaled_dot_product_flash_attention_for_cpu", 30, 60),
        event("aten::mul", 60, 65),
        event("gloo:all_to_all", 50, 80, "user_annotation", tid=2),  # 15 after all operators
        event("aten::mul", 0, 100, tid=2),
        {"name": "no duration", "ts": 0},
    ]
    own, total = own_microseconds(events)
    assert total == 100
    assert {name: value for name, value in own.items() if value} == {
        "aten::linear": 10,
        PRODUCTS: 20,
        ATTENTION: 30,
        "aten::mul": 5,
        EXCHANGE: 15,
        OUTSIDE: 20,
    }
    assert sum(own.values()) == total
