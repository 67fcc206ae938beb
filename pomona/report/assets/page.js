"use strict";
// Draws the figures in #figures with plotly.js: each chart when it comes into view, in the colors of the theme.

const PALETTES = {
  light: ["#d55e00", "#009e73", "#0072b2", "#cc79a7", "#c98a00", "#3f9fd6", "#7f5aa8", "#6d6d6d"],
  dark: ["#f58a42", "#34c79a", "#58a9e4", "#e39fc6", "#f0b840", "#8ccbf0", "#b79ce0", "#b0b0b0"],
};
const HEAT = {
  light: [[0, "#f3f1ea"], [0.5, "#6fbf9f"], [0.9, "#00745a"], [1, "#053b2f"]],
  dark: [[0, "#1e2622"], [0.5, "#1d6b52"], [0.9, "#4fcfa6"], [1, "#e4fff4"]],
};
const NARROW = 640, LEGEND_BESIDE = 700, MOST_LEGEND_ROWS = 12, REFRESH_MS = 2000;

let figures = JSON.parse(document.getElementById("figures").textContent);
const root = document.documentElement, systemDark = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Set();

function theme() {
  return root.dataset.theme || (systemDark.matches ? "dark" : "light");
}

function color(name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

function paint(part) {  // replaces the references "@3" and "@ink" in a line, a marker or an error bar
  if (!part || typeof part.color !== "string" || part.color[0] !== "@") return part;
  const key = part.color.slice(1);
  return {...part, color: key === "ink" ? color("--muted") : PALETTES[theme()][Number(key)]};
}

function paintTrace(trace) {
  if (trace.type === "heatmap") {
    return {...trace, colorscale: HEAT[theme()], colorbar: {...trace.colorbar, tickfont: {color: color("--muted")}}};
  }
  return {...trace, line: paint(trace.line), marker: paint(trace.marker), error_y: paint(trace.error_y)};
}

function makeLayout(figure, width) {
  const ink = color("--ink"), muted = color("--muted"), line = color("--line"), narrow = width < NARROW;
  const entries = figure.data.filter(trace => trace.type !== "heatmap" && trace.showlegend !== false).length;
  const beside = width >= LEGEND_BESIDE, rows = Math.ceil(entries / Math.max(1, Math.floor(width / 170)));
  const axis = own => ({
    gridcolor: line, linecolor: line, zeroline: false, automargin: true, tickfont: {color: muted, size: 12},
    ...own, title: {...own.title, font: {color: muted, size: 13}, standoff: 10},
  });
  const legend = beside
    ? {x: 1.01, xanchor: "left", y: 1, yanchor: "top"}
    : {orientation: "h", x: 0, xanchor: "left", y: -0.22, yanchor: "top"};
  return {
    autosize: true, height: 400 + (beside ? 0 : Math.min(rows, MOST_LEGEND_ROWS) * 21), uirevision: "kept",
    font: {family: getComputedStyle(document.body).fontFamily, color: ink, size: 13},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    dragmode: narrow ? false : "zoom", margin: {l: 56, r: narrow ? 12 : 24, t: 16, b: 52},
    hoverlabel: {bgcolor: color("--card"), bordercolor: line, font: {color: ink, size: 13}, align: "left", namelength: -1},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: color("--accent")},
    showlegend: entries > 1 && (beside || rows <= MOST_LEGEND_ROWS),
    ...figure.layout,
    legend: {bgcolor: "rgba(0,0,0,0)", font: {size: 12, color: ink}, ...legend},
    shapes: (figure.layout.shapes || []).map(shape => ({...shape, line: paint(shape.line)})),
    xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
  };
}

function draw(chart) {
  const plot = chart.querySelector(".plot"), select = chart.querySelector("select");
  const figure = (figures[chart.id.slice("chart-".length)] || [])[select ? select.selectedIndex : 0];
  if (!figure) return;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: plot.clientWidth < NARROW ? false : "hover",
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  };
  plot.style.minHeight = "0";
  drawn.add(chart);
  Plotly.react(plot, figure.data.map(paintTrace), makeLayout(figure, plot.clientWidth), config);
}

const charts = [...document.querySelectorAll(".chart")];
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) {
    if (entry.isIntersecting) {
      observer.unobserve(entry.target);
      if (!drawn.has(entry.target)) draw(entry.target);
    }
  }
}, {rootMargin: "200px"});

for (const chart of charts) {
  observer.observe(chart);
  const select = chart.querySelector("select");
  if (select) select.addEventListener("change", () => draw(chart));
}

// ---- theme, print and size

function remember(value) {
  try { value === undefined ? null : localStorage.setItem("pomona-theme", value); return localStorage.getItem("pomona-theme"); }
  catch { return null; }  // a browser may refuse storage to a page from the disk
}

function setTheme(value) {
  if (value) root.dataset.theme = value; else delete root.dataset.theme;
  drawn.forEach(draw);
}

setTheme(remember());
systemDark.addEventListener("change", () => drawn.forEach(draw));
document.getElementById("theme").addEventListener("click", () => {
  const value = theme() === "dark" ? "light" : "dark";
  remember(value);
  setTheme(value);
});

let screenTheme;
addEventListener("beforeprint", () => {
  screenTheme = root.dataset.theme || "";
  root.dataset.theme = "light";
  charts.forEach(draw);
});
addEventListener("afterprint", () => setTheme(screenTheme));

let width = innerWidth;
addEventListener("resize", () => {
  if ((width < NARROW) !== (innerWidth < NARROW)) drawn.forEach(draw);
  width = innerWidth;
});

// ---- a live page asks its server for news

function choices(data) {
  return JSON.stringify(Object.entries(data).map(([name, figures]) => [name, figures.length]));
}

async function refresh(version) {
  const badge = document.getElementById("live");
  let next = version;
  try {
    const response = await fetch(`report.json?version=${version}`);
    badge.textContent = "live";
    if (response.status === 200) {
      const news = await response.json();
      next = news.version;
      const isSame = choices(news.figures) === choices(figures)
        && Object.keys(news.contents).every(name => document.querySelector(`#${name} > .content`));
      if (!isSame) return location.reload();
      figures = news.figures;
      for (const [name, content] of Object.entries(news.contents)) {
        document.querySelector(`#${name} > .content`).innerHTML = content;
      }
      drawn.forEach(draw);
    }
  } catch { badge.textContent = "the server has stopped"; }
  setTimeout(refresh, REFRESH_MS, next);
}

if (root.dataset.live === "true") {
  document.getElementById("live").hidden = false;
  refresh("");
}
