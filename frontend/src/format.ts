export function number(value: number | string | null | undefined, digits = 4): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (!Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export function signed(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : "") + number(value, digits).replace("-", "−");
}

export function percent(value: number | null | undefined, digits = 1): string {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}

export function duration(seconds: number | null): string {
  if (seconds === null) return "–";
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.round(seconds)} s`;
  if (minutes < 60) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// What a terminal or an eye would not show, made visible; line breaks stay.
export function visible(text: string): string {
  return text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (c) => {
    const code = c.charCodeAt(0);
    if (code === 9) return "→";
    return code < 32 ? String.fromCharCode(0x2400 + code) : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}
