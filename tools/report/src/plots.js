// The plots of a tensor: the histogram over its grid, its scales per channel, the bits of an accumulator.
import * as Plot from "@observablehq/plot";

const BASE = { width: 420, marginLeft: 52, marginRight: 12, style: { background: "transparent", color: "var(--text)", fontSize: "11px" } };
const short = (value) => Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-2) ? value.toExponential(0) : String(value);

// Bars: codes behind the quantizer. Line: values in front of it, in steps of the scale. Both per code, so that they compare.
export function histogram(tensor) {
  const h = tensor.histogram;
  const after = h.after.map((count, i) => ({ x1: h.qmin - 0.5 + i * h.width, x2: h.qmin - 0.5 + (i + 1) * h.width, y: count / h.width }));
  const marks = [Plot.rectY(after, { x1: "x1", x2: "x2", y: "y", fill: "var(--after)", insetLeft: 0.3, insetRight: 0.3 })];
  let [left, right] = [after[0].x1, after.at(-1).x2];
  if (h.before) {
    const start = h.qmin + h.before_start;
    const steps = h.before.flatMap((count, i) => {
      const y = count / h.before_width;
      return [{ x: start + i * h.before_width, y }, { x: start + (i + 1) * h.before_width, y }];
    });
    marks.push(Plot.line(steps, { x: "x", y: "y", stroke: "var(--before)", strokeWidth: 1.2 }));
    [left, right] = [steps[0].x, steps.at(-1).x];
    marks.push(Plot.ruleX([after[0].x1, after.at(-1).x2], { stroke: "var(--muted)", strokeDasharray: "3,3" }));
  }
  marks.push(Plot.ruleY([0], { stroke: "var(--muted)" }));
  return figure(
    Plot.plot({
      ...BASE,
      height: 170,
      ariaLabel: `Histogram of ${tensor.name} over its codes ${tensor.qmin} to ${tensor.qmax}`,
      x: { label: "code", domain: [left, right] },
      y: { label: "values per code (square-root scale)", type: "sqrt", ticks: 4, tickFormat: short },
      marks,
    }),
    h.before ? "Bars: codes. Line: values before quantization. Dashed: the ends of the codes' range." : "Bars: codes.",
  );
}

export function scales(tensor) {
  const data = tensor.scale.map((y, x) => ({ x, y }));
  const [low, high] = [Math.min(...tensor.scale), Math.max(...tensor.scale)];
  const wide = low > 0 && high / low > 20;
  const mark = data.length > 150 ? Plot.line : Plot.dot;
  const style = data.length > 150 ? { stroke: "var(--before)" } : { fill: "var(--before)", r: 2.2 };
  return figure(
    Plot.plot({
      ...BASE,
      height: 120,
      ariaLabel: `Scales of ${tensor.name} by channel`,
      x: { label: "channel", tickFormat: "d" },
      y: { label: "scale", type: wide ? "log" : "linear", domain: wide ? [low, high] : [0, high], ticks: 4, tickFormat: short },
      marks: [mark(data, { x: "x", y: "y", ...style })],
    }),
    `${tensor.scales} scales, ${low.toPrecision(4)} to ${high.toPrecision(4)}${low > 0 ? `, ratio ${(high / low).toPrecision(3)}` : ""}.`,
  );
}

export function accumulator(bits) {
  const rows = [
    ["register", bits.register],
    ["worst input", bits.worst],
    ["data, partial sums", bits.partial],
    ["data, final sums", bits.observed],
  ].filter(([, value]) => value !== null && value !== undefined);
  const over = bits.worst > bits.register;
  return figure(
    Plot.plot({
      ...BASE,
      height: 30 + 24 * rows.length,
      marginLeft: 112,
      ariaLabel: "Bits of the accumulator",
      x: { label: "bits", domain: [0, Math.max(...rows.map(([, value]) => value)) + 2] },
      y: { label: null, domain: rows.map(([name]) => name) },
      marks: [
        Plot.barX(rows, { y: "0", x: "1", fill: (row) => (row[0] === "register" ? "var(--muted)" : over && row[0] === "worst input" ? "var(--bad)" : "var(--after)") }),
        Plot.text(rows, { y: "0", x: "1", text: "1", textAnchor: "start", dx: 4 }),
      ],
    }),
    over ? "Some input overflows this register." : `No input can use ${bits.register - bits.worst} of the register's bits.`,
  );
}

function figure(svg, caption) {
  const made = document.createElement("figure");
  svg.setAttribute("role", "img");
  // the label of the whole says it; those of its groups, which have no role, are not allowed
  for (const group of svg.querySelectorAll("g[aria-label]")) group.removeAttribute("aria-label");
  const text = document.createElement("figcaption");
  text.textContent = caption;
  made.append(svg, text);
  return made;
}
