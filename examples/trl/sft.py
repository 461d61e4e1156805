import posttrain

run = posttrain.sft(
    model="Qwen/Qwen2.5-0.5B",
    data="trl-lib/Capybara",
)
