"""``posttrain serve``: what came out of a run, behind the API that clients of OpenAI speak."""
