// Draw the charts in the colours of the theme, and again when the theme changes or the page is printed.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const colours = () => {
    const style = getComputedStyle(root);
    const roles = ["text", "muted", "grid", "surface", "fast", "reference", "peer", "limit", "bad", "good",
                   "fast-soft", "reference-soft"];
    return Object.fromEntries(roles.map((role) => ["@" + role, style.getPropertyValue("--" + role).trim()]));
  };

  const paint = (value, palette) => {
    if (typeof value === "string") return palette[value] ?? value;
    if (Array.isArray(value)) return value.map((item) => paint(item, palette));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, paint(item, palette)]));
    }
    return value;
  };

  const family = getComputedStyle(document.body).fontFamily;
  const draw = () => {
    const palette = { ...colours(), inherit: family };
    delete root.dataset.drawn;
    const charts = [...document.querySelectorAll(".chart")].map((place) => {
      const figure = paint(JSON.parse(place.nextElementSibling.textContent), palette);
      return Plotly.react(place, figure.data, figure.layout, { displayModeBar: false, responsive: true });
    });
    Promise.all(charts).then(() => { root.dataset.drawn = charts.length; });
  };

  // A chart inside a closed <details> has no width; give it one when it opens.
  document.addEventListener("toggle", (event) => {
    for (const place of event.target.querySelectorAll?.(".chart") ?? []) Plotly.Plots.resize(place);
  }, true);

  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    draw();
  });
  dark.addEventListener("change", draw);

  // Paper has no clicks: everything open and light, then back as it was.
  let closed = [];
  let theme;
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    for (const item of closed) item.open = true;
    theme = root.dataset.theme;
    root.dataset.theme = "light";
    draw();
  });
  addEventListener("afterprint", () => {
    for (const item of closed) item.open = false;
    if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
    draw();
  });

  draw();
})();
