"use strict";
// Specifications of the charts, in Vega-Lite. Colours are variables of the style sheet.

const CONFIG = {
  background: null,
  font: "system-ui, sans-serif",
  view: { stroke: "var(--line)" },
  axis: {
    labelColor: "var(--soft)", titleColor: "var(--ink)", gridColor: "var(--grid)", domainColor: "var(--line)",
    tickColor: "var(--line)", titleFontWeight: 500, labelFontSize: 11, titleFontSize: 12,
  },
  legend: { labelColor: "var(--ink)", titleColor: "var(--ink)", orient: "bottom", labelFontSize: 12, labelLimit: 220 },
  header: { labelColor: "var(--ink)", titleColor: "var(--ink)", labelFontSize: 12 },
  text: { fill: "var(--ink)" },
};

const narrow = () => innerWidth < 560;

const ROLES = [
  // role, how the legend calls it, colour, shape
  ["front", "on the front", "var(--front)", "circle"],
  ["dominated", "behind the front", "var(--dominated)", "circle"],
  ["baseline", "trained to compare", "var(--baseline)", "diamond"],
  ["parent", "the parent, as given", "var(--parent)", "square"],
  ["paper", "papers' row, at its price alone", "var(--papers)", "triangle-down"],
];

const TIP = [
  ["architecture", "architecture"], ["runs_as", "runs as"], ["said", "perplexity"], ["time", "seconds"],
  ["sent", "sent"], ["rounds", "rounds"],
].map(([field, title]) => ({ field, title, type: "nominal" }));

// rows: points with price, perplexity, place ("front", ...), low, high, least, most; front: the step through the front.
function frontSpec({ rows, front, ngrams, budget, axis, domain, chosen, height }) {
  const roles = ROLES.filter(([role]) => rows.some((row) => row.role === role));
  const x = {
    field: "price", type: "quantitative", title: axis, scale: { zero: false, nice: false, padding: 24 },
    axis: { tickCount: 8 },
  };
  const y = {
    field: "perplexity", type: "quantitative", title: "validation perplexity (log scale)",
    scale: { type: "log", domain, nice: false }, axis: { format: "~g", tickCount: 8 },
  };
  const papers = rows.filter((row) => row.role === "paper");
  const trained = rows.filter((row) => row.role !== "paper");
  const ranged = trained.filter((row) => row.least !== null);
  const spread = trained.filter((row) => row.low !== null);
  const numbered = trained.filter((row) => row.number);
  const labels = roles.map(([name, said]) => `datum.value === "${name}" ? "${said}" : `).join("");
  const legend = { labelExpr: `${labels}""`, columns: narrow() ? 1 : 3, symbolOpacity: 1 };
  const role = {
    color: {
      field: "role", type: "nominal", title: null,
      scale: { domain: roles.map((one) => one[0]), range: roles.map((one) => one[2]) },
      legend,
    },
    shape: {
      field: "role", type: "nominal", title: null,
      scale: { domain: roles.map((one) => one[0]), range: roles.map((one) => one[3]) }, legend,
    },
  };
  const size = { condition: { test: "datum.point === chosen", value: 260 }, value: 90 };
  const outline = { condition: { test: "datum.point === chosen", value: "var(--ink)" }, value: "var(--paper)" };
  const mark = { type: "point", filled: true, opacity: 1, cursor: "pointer" };
  return {
    width: "container", height, config: CONFIG, params: [{ name: "chosen", value: chosen }],
    layer: [
      ngrams.length && { data: { values: ngrams }, mark: { type: "rule", strokeDash: [2, 3], stroke: "var(--soft)" }, encoding: { y } },
      ngrams.length && {
        data: { values: ngrams }, mark: { type: "text", align: "left", baseline: "bottom", dx: 4, dy: -1, fontSize: 11, fill: "var(--soft)" },
        encoding: { y, x: { value: 0 }, text: { field: "name" } },
      },
      budget !== null && {
        data: { values: [{ price: budget }] },
        mark: { type: "rule", strokeDash: [6, 4], stroke: "var(--budget)", strokeWidth: 1.5 }, encoding: { x },
      },
      budget !== null && {
        data: { values: [{ price: budget }] },
        mark: { type: "text", align: "right", baseline: "bottom", dx: -4, dy: -4, fontSize: 11, fill: "var(--budget)" },
        encoding: { x, y: { value: "height" }, text: { value: "budget" } },
      },
      front.length && {
        data: { values: front }, mark: { type: "line", interpolate: "step-after", stroke: "var(--front)", strokeWidth: 1.5 },
        encoding: { x, y, order: { field: "price", type: "quantitative" } },
      },
      ranged.length && {
        data: { values: ranged },
        mark: { type: "rule", strokeWidth: 1, opacity: 0.5 },
        encoding: { x: { ...x, field: "least" }, x2: { field: "most" }, y, color: role.color },
      },
      spread.length && {
        data: { values: spread }, mark: { type: "rule", strokeWidth: 2 },
        encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" }, color: role.color },
      },
      papers.length && {
        data: { values: papers }, mark,
        encoding: { x, y: { value: 9 }, ...role, size, stroke: outline, tooltip: TIP, description: { field: "architecture" } },
      },
      {
        data: { values: trained }, mark,
        encoding: { x, y, ...role, size, stroke: outline, tooltip: TIP, description: { field: "architecture" } },
      },
      numbered.length && {
        data: { values: numbered },
        mark: { type: "text", dx: 13, dy: -11, fontSize: 12, fontWeight: 600 },
        encoding: { x, y, text: { field: "number", type: "nominal" } },
      },
    ].filter(Boolean),
  };
}

// rows: one for every model and kind of op, with the value.
function barsSpec({ rows, kinds, axis, chosen }) {
  return {
    width: "container", height: 26 * new Set(rows.map((row) => row.label)).size, config: CONFIG, params: [{ name: "chosen", value: chosen }],
    data: { values: rows }, mark: { type: "bar", stroke: "var(--paper)", strokeWidth: 0.6 },
    encoding: {
      y: {
        field: "label", type: "nominal", title: null, sort: { field: "order" },
        axis: { labelLimit: 210, labelFontSize: 12 },
      },
      x: { field: "value", type: "quantitative", title: axis, stack: true, axis: { tickCount: 8 } },
      color: {
        field: "kind", type: "nominal", title: null,
        scale: { domain: kinds, range: kinds.map((_, index) => `var(--k${index % 12})`) }, legend: { columns: narrow() ? 2 : 6, symbolOpacity: 1 },
      },
      order: { field: "kind_order", type: "quantitative" },
      opacity: { condition: { test: "datum.point === chosen", value: 1 }, value: 0.8 },
      tooltip: [
        { field: "label", title: "model", type: "nominal" }, { field: "kind", title: "kind of op", type: "nominal" },
        { field: "said", title: "cost", type: "nominal" }, { field: "share", title: "share", type: "quantitative", format: ".1%" },
      ],
    },
  };
}

function curvesSpec({ rows, chosen }) {
  const named = { condition: { test: "datum.number === chosen", value: "var(--front)" }, value: "var(--dominated)" };
  const opacity = { condition: { test: "datum.number === chosen", value: 1 }, value: 0.45 };
  const encoding = {
    x: { field: "tokens", type: "quantitative", title: "training tokens", axis: { format: "~s", tickCount: 6 } },
    y: { field: "loss", type: "quantitative", title: "loss (nats a token)", scale: { zero: false } },
    detail: { field: "number", type: "nominal" },
    color: named, opacity,
    tooltip: [
      { field: "number", title: "no.", type: "nominal" }, { field: "series", title: "loss of", type: "nominal" },
      { field: "tokens", title: "tokens", type: "quantitative", format: "," },
      { field: "loss", title: "nats", type: "quantitative", format: ".3f" },
    ],
  };
  const [training, validation] = ["training", "validation"].map((name) => rows.filter((row) => row.series === name));
  const ends = new Map(validation.map((row) => [row.number, row]));
  return {
    width: "container", height: 300, config: CONFIG, params: [{ name: "chosen", value: chosen }],
    layer: [
      training.length && { data: { values: training }, mark: { type: "line", strokeWidth: 1 }, encoding },
      validation.length && {
        data: { values: validation }, mark: { type: "line", strokeWidth: 2, point: { size: 45 } }, encoding,
      },
      validation.length && {
        data: { values: [...ends.values()] }, mark: { type: "text", dx: 12, fontSize: 11, fontWeight: 600 },
        encoding: { x: encoding.x, y: encoding.y, text: { field: "number", type: "nominal" } },
      },
    ].filter(Boolean),
  };
}

function entropySpec({ rows, most, columns }) {
  const shades = [0, 1, 2, 3, 4, 5, 6].map((index) => `var(--h${index})`);
  return {
    config: CONFIG, data: { values: rows }, columns, spacing: 14,
    facet: { field: "title", type: "ordinal", title: null, sort: { field: "number" } },
    spec: {
      width: 132, height: 132, mark: "rect",
      encoding: {
        x: { field: "head", type: "ordinal", title: "head", axis: { labelAngle: 0, ticks: false, labelOverlap: true } },
        y: { field: "layer", type: "ordinal", title: "layer", axis: { ticks: false, labelOverlap: true } },
        color: {
          field: "entropy", type: "quantitative", title: "nats",
          scale: { type: "quantize", domain: [0, most], range: shades }, legend: { format: ".1f", direction: "horizontal" },
        },
        tooltip: [
          { field: "title", title: "model", type: "nominal" }, { field: "layer", type: "ordinal" },
          { field: "head", type: "ordinal" }, { field: "entropy", title: "nats", type: "quantitative", format: ".2f" },
        ],
      },
    },
      };
}

function hypervolumeSpec({ rows }) {
  return {
    width: "container", height: 220, config: CONFIG, data: { values: rows },
    mark: { type: "line", interpolate: "step-after", stroke: "var(--front)", strokeWidth: 2, point: { size: 40, fill: "var(--front)" } },
    encoding: {
      x: { field: "tokens", type: "quantitative", title: "training tokens of all trials together", axis: { format: "~s", tickCount: 6 } },
      y: { field: "hypervolume", type: "quantitative", title: "hypervolume (s*nat)" },
      tooltip: [
        { field: "tokens", type: "quantitative", format: "," },
        { field: "hypervolume", title: "s*nat", type: "quantitative", format: ".2f" },
      ],
    },
  };
}
